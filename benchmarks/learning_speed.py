"""Measure how fast agents learn on a GPU: gradient, errors, whole runs, many runs, and whether the kernels learn alike.

    python benchmarks/learning_speed.py --rows gradient errors --out speed.json --runs-dir runs/speed
    python benchmarks/learning_speed.py --rows many-4m --out speed.json --runs-dir runs/speed --limit 560
    python benchmarks/learning_speed.py --rows many-4m --out speed.json --runs-dir runs/speed --limit 560  # goes on
    python benchmarks/learning_speed.py --tiny --device cpu --out tiny.json --runs-dir /tmp/tiny  # without the kernels

Rows:
  gradient  nanoseconds per sample of the fused kernels for 1 and 32 runs, of torch.compile, and of JAX (only AdaPool in
            SimpleCentroid, without dropout), beside what exponentials and multiplications alone take
  errors    largest error against float64 autograd: random networks, and weights of runs that are trained for it. The
            random networks have all heads, dropout or not, padding with NaN, queries and keys multiplied by up to 3;
            tests/nn/test_fused.py (`make test-gpu`) adds larger scores
  one-run   a run of 4 million steps, with empty caches of compiled code ("cold") and again ("warm")
  many-1m   160 runs of 1.02 million steps by `compare.py --together`: four heads, four noise levels, ten seeds
  many-4m   the same with 4 million steps
  learn     twenty seeds without dropout, with bounded means and query vectors, by the kernels and by torch: the
            difference of their interquartile means; both runs of a seed start with the same weights, environments and
            noise, so they are resampled in pairs
  start     seconds of the parts of a start, cold and warm

The results of each row are added to --out as it ends; a row that is there is not measured again, so take another file,
or remove the row, to repeat it. --limit is for the whole call: near it, runs save their checkpoints and stop, and the
next call goes on with the row, whose seconds are added up. On another machine that needs both --out and --runs-dir.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import fused_check
import numpy as np

from noisy_envs.training.checkpoint import read_summary, write_summary
from noisy_envs.training.files import new_folder
from noisy_envs.training.process import EXIT_INTERRUPTED, INTERRUPT, last_message
from noisy_envs.training.statistics import iqm, paired_difference
from noisy_envs.training.versions import library_versions

ROOT = Path(__file__).parents[1]
ENV_ID = "noisy_envs/SimpleCentroid-1v3v28-v0"
STEPS_1M, STEPS_4M = 1_024_000, 4_000_000
HEADS = ("adapool", "avgpool", "maxpool", "clstoken")
CACHES = "NOISY_ENVS_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"  # of compiled code
GRACE = 30  # seconds in which runs save checkpoints and stop
NETWORK_SECONDS = 100  # that the times of a network may take, most of them to compile by torch
LEARN = "--preset", "paper", "--query-vector", "all", "--bounded-means", "--dropout", 0  # where seeds differ little
TINY = [
    "--num-envs=4",
    "--num-steps=16",
    "--minibatch-size=32",
    "--update-epochs=1",
    "--eval-episodes=3",
    "--no-compile",
]


class Stopped(Exception):
    """The time limit came before the end of a row."""


class Row(NamedTuple):
    """What the measurement of a row is given: settings, the time to stop, and the row's results, which it fills in."""

    args: argparse.Namespace
    deadline: float  # of time.monotonic()
    results: dict[str, Any]

    @property
    def left(self) -> float:
        """Seconds until runs must stop."""
        return self.deadline - GRACE - time.monotonic()

    @property
    def on_gpu(self) -> bool:
        """Whether the kernels can run."""
        return bool(self.args.device.startswith("cuda"))

    def seeds(self, number: int) -> list[str]:
        """Return the seeds of so many runs, two for a tiny row."""
        return [str(seed) for seed in range(1, (2 if self.args.tiny else number) + 1)]

    def agent_args(self, steps: int, kernel: str | None = None) -> list[str]:
        """Return an agent's arguments."""
        tiny = [*TINY, "--total-timesteps", "128"] if self.args.tiny else ["--total-timesteps", str(steps)]
        return ["--device", self.args.device, "--kernel", kernel or self.args.kernel, *tiny]

    def run(self, name: str, command: Sequence[object], **variables: str) -> tuple[str, float]:
        """Run a Python program, whose output is added to a log; return the output and the seconds.

        Raises:
            Stopped: the time limit came; the program was asked to stop, as by Ctrl-C.
            RuntimeError: the program failed, but not with a list of failed runs.
        """
        path = self.args.runs_dir / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
        start, words = time.perf_counter(), [sys.executable, *map(str, command)]
        with path.open("ab") as log:
            begin = log.seek(0, os.SEEK_END)
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
            status, patience = None, max(self.left, 0)
            while status is None:
                try:
                    status = process.wait(patience)
                except subprocess.TimeoutExpired:
                    process.send_signal(INTERRUPT)  # the second one ends runs at once
                    patience = GRACE
        output = path.read_bytes()[begin:].decode(errors="replace")
        if status == EXIT_INTERRUPTED or (status and self.left <= 0):
            raise Stopped
        if status and "runs failed" not in output:
            raise RuntimeError(f"{name}: exit status {status}: {last_message(output)}, see {path}")
        return output, time.perf_counter() - start


def attempt(function: Callable[[], Any]) -> Any:
    """Return the result of a part of a row, None after an error, which is printed."""
    try:
        return function()
    except Stopped:
        raise
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return None


def time_jax(row: Row) -> fused_check.Times:
    """Time JAX in a process of its own."""
    size = ["--samples", 256, "--repeats", 2] if row.args.tiny else []
    output, _ = row.run("jax", [ROOT / "benchmarks" / "jax_gradient.py", *size])
    found = json.loads(output.splitlines()[-1])
    times = fused_check.Times.of(found["times"])
    print(f"JAX: {times}, error {found['error']:.1e}, {found['device']}", flush=True)
    return times


def gradient(row: Row) -> None:
    """Time the gradients of all networks."""
    done = row.results.setdefault("networks", {})
    missing = {name: size for name, size in fused_check.SIZES.items() if name not in done}
    if row.on_gpu:
        all_runs = [fused_check.many(name, runs) for name in missing for runs in (1, 32)]
        fused_check.compile_all([(problem, fused_check.SAMPLES, None) for problem in all_runs])
    for name, size in missing.items():
        if row.left < (NETWORK_SECONDS if row.on_gpu else 0):
            raise Stopped
        problem = fused_check.large_problem(name) if row.on_gpu else fused_check.problem_of(size, 1, 16)
        found: dict[str, Any] = fused_check.limits(problem)
        if row.on_gpu:
            attempt(partial(fused_check.add_limits, found))
            ours = found["1 run, ns"], found["32 runs, ns"] = fused_check.time_size(name, all_runs=(1, 32))
            found["torch, ns"] = attempt(partial(fused_check.time_torch, name))
        if name == "centroid, AdaPool":
            jax = found["jax, ns"] = attempt(partial(time_jax, row))
            if jax is not None and row.on_gpu:
                found["jax / 1 run"] = jax.median / ours[0].median
        print(f"{name}: {describe(found)}", flush=True)
        done[name] = found


def errors(row: Row) -> None:
    """Compare the kernels with float64 autograd, on random networks and on trained ones."""
    out = row.args.runs_dir / "errors"
    command = [ROOT / "agents" / "many_runs.py", "--out", out, "--agents", *HEADS, "--seeds", 1, "--"]
    row.run("errors", [*command, "--env-id", ENV_ID, "--no-compile", *row.agent_args(131_072, "torch")])
    runs = sorted(path.parent for path in out.glob("*/seed-1/*/checkpoint.pt"))
    trained = [fused_check.trained_problem(run, dropout) for run in runs for dropout in (0.0, 0.1)]
    cases = map(fused_check.fused_cases.random_case, range(row.args.networks))
    problems = {"random": list(map(fused_check.fused_cases.make_problem, cases)), "trained": trained}
    if not row.on_gpu:
        print(f"{sum(map(len, problems.values()))} networks were drawn; comparing the kernels needs a GPU")
        return
    fused_check.compile_all([(x, x.case.samples, None) for group in problems.values() for x in group])
    for name, group in problems.items():
        worst, failed = fused_check.check_all(group)
        row.results[name] = {"networks": len(group), "worst error": worst, "failed": failed}
        print(f"{name}: {describe(row.results[name])}", flush=True)


def cache_variables(folder: str) -> dict[str, str]:
    """Return variables that put caches of compiled code into a folder."""
    return {name: str(Path(folder) / name.lower()) for name in CACHES}


def one_run(row: Row) -> None:
    """Time a whole run, with empty caches and again."""
    command = [ROOT / "agents" / "ppo_adapool.py", "--env-id", ENV_ID, "--no-capture-video", *row.agent_args(STEPS_4M)]
    with tempfile.TemporaryDirectory() as caches:
        for name in ("cold", "warm"):
            folder = new_folder(row.args.runs_dir, f"one-run-{name}")
            _, wall = row.run("one-run", [*command, "--run-dir", folder], **cache_variables(caches))
            (summary,) = summaries(folder)
            parts = {x: summary[f"{x}_seconds"] for x in ("train", "first_update", "finish")}
            row.results[name] = {"wall": wall, **parts, "steps": summary["steps"], "score": summary["score"]}
            print(f"{name}: {describe(row.results[name])}", flush=True)


def summaries(folder: Path) -> list[dict[str, Any]]:
    """Return the summaries of all finished runs in a folder."""
    return [read_summary(path) for path in sorted(folder.rglob("summary.json"))]


def many_runs(name: str, steps: int) -> Callable[[Row], None]:
    """Return a row of 160 runs."""

    def measure(row: Row) -> None:
        folder = row.args.runs_dir / name
        seeds = row.seeds(10)
        command = [ROOT / "agents" / "compare.py", "--together", "--out", folder, "--seeds", *seeds]
        command += ["--agents", *HEADS[:2], "--env-ids", ENV_ID] if row.args.tiny else []
        try:
            row.run(name, [*command, "--", *row.agent_args(steps)])
        finally:
            total = len(seeds) * (2 if row.args.tiny else 16)
            found = describe_runs(summaries(folder), total)
            row.results.update(found)
            print(f"{name}: {describe(found)}", flush=True)

    return measure


def describe_runs(found: list[dict[str, Any]], total: int) -> dict[str, Any]:
    """Return what finished runs of a comparison took; those of a head and a noise level train side by side."""
    seconds: dict[Any, float] = {}
    for x in found:
        cell = x["env_id"], x["agent"]
        seconds[cell] = max(seconds.get(cell, 0.0), x["train_seconds"])
    steps, learning = sum(x["steps"] for x in found), sum(seconds.values())
    scored = sum(x["score"] is not None for x in found)
    result = {"runs": scored, "not finished or failed": total - scored, "steps": steps, "learning": learning}
    return result | ({"steps/s of learning": steps / learning} if found else {})


def learn(row: Row) -> None:
    """Train twenty seeds by the kernels and by torch, and compare their scores in pairs of the same seed."""
    kernels = ("fused", "torch") if row.on_gpu else ("auto", "torch")
    for kernel in kernels:
        folder = row.args.runs_dir / f"learn-{kernel}"
        command = [ROOT / "agents" / "compare.py", "--out", folder, "--agents", HEADS[0], "--env-ids", ENV_ID]
        command += ["--seeds", *row.seeds(20)]  # by torch runs train alone, since that compiles them
        command += ["--no-together", "--jobs", 1 if row.args.tiny else 5] if kernel == "torch" else ["--together"]
        row.run("learn", [*command, "--", *LEARN, *row.agent_args(STEPS_1M, kernel)])
        scores = {str(x["seed"]): x["score"] for x in summaries(folder) if x["score"] is not None}
        row.results[kernel] = {"iqm": float(iqm(np.array([*scores.values()]))), "runs": len(scores), "scores": scores}
    first, second = (row.results[kernel]["scores"] for kernel in kernels)
    pairs = [(first[seed], second[seed]) for seed in first if seed in second]  # without those of which a run failed
    difference = row.results["difference"] = paired_difference(*zip(*pairs, strict=True))
    iqms = ", ".join(f"{kernel} {row.results[kernel]['iqm']:.3f}" for kernel in kernels)
    print(f"interquartile means: {iqms}; difference of {len(pairs)} pairs of the same seed {difference}", flush=True)


def start(row: Row) -> None:
    """Time the parts of a start, with empty caches and again."""
    command = [ROOT / "benchmarks" / "start_speed.py", "--", "--env-id", ENV_ID, *row.agent_args(STEPS_4M)]
    with tempfile.TemporaryDirectory() as caches:
        for name in ("cold", "warm"):
            output, wall = row.run("start", command, **cache_variables(caches))
            row.results[name] = {**json.loads(output.splitlines()[-1]), "wall": wall}
            print(f"{name}: {describe(row.results[name])}", flush=True)


ROWS: dict[str, Callable[[Row], None]] = {
    "gradient": gradient,
    "errors": errors,
    "one-run": one_run,
    "many-1m": many_runs("many-1m", STEPS_1M),
    "many-4m": many_runs("many-4m", STEPS_4M),
    "learn": learn,
    "start": start,
}


def describe(numbers: dict[str, Any]) -> str:
    """Format numbers, and times with their ranges, in a line."""
    texts = {
        name: str(x) if not isinstance(x, int | float) else f"{x:.4g}" if abs(x) < 1000 else f"{x:,.0f}"
        for name, x in numbers.items()
    }
    return "; ".join(f"{name} {text}" for name, text in texts.items())


def measure_row(name: str, args: argparse.Namespace, deadline: float, table: dict[str, Any]) -> bool:
    """Measure a row, or go on with it, and write the results; return whether it is complete.

    Raises:
        SystemExit: the row was begun with other settings.
    """
    settings = {"device": args.device, "kernel": args.kernel, "tiny": args.tiny}
    results = table.setdefault(name, {"done": False, "seconds": [], "settings": settings})
    if results["settings"] != settings:
        raise SystemExit(f"error: in {args.out} {name} has {results['settings']}, got {settings}; take another file")
    if results["done"]:
        print(f"== {name} is in {args.out}", flush=True)
        return True
    print(f"== {name}", flush=True)
    began = time.perf_counter()
    try:
        ROWS[name](Row(args, deadline, results))
        results["done"] = True
    except Stopped:
        print("stopped at --limit: the same command goes on")
    except Exception:
        traceback.print_exc(file=sys.stdout)
    finally:  # Ctrl-C too
        results["seconds"].append(time.perf_counter() - began)
        wall = results["wall"] = sum(results["seconds"])
        if "steps" in results:
            results["steps/s of all"] = results["steps"] / wall
        results["versions"] = library_versions()
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_summary(args.out, table)
    calls = f" in {len(results['seconds'])} calls" if len(results["seconds"]) > 1 else ""
    total = f", {results['steps/s of all']:,.0f} steps/s of all" if "steps" in results else ""
    print(f"   ({wall:.1f} s{calls}{total})", flush=True)
    return bool(results["done"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the rows that are asked for; return 1 if one is not complete."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--out", type=Path, required=True, help="JSON file of results")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/speed"), help="folder of all runs and logs")
    parser.add_argument("--limit", type=float, default=570, help="seconds of this call")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernel", default="auto", choices=("auto", "fused", "torch"), help="of whole runs")
    parser.add_argument("--networks", type=int, default=100, help="random networks to check")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the program")
    args = parser.parse_args(argv)
    deadline, args.runs_dir = time.monotonic() + args.limit, args.runs_dir.resolve()
    table = read_summary(args.out) if args.out.exists() else {}
    print(json.dumps(library_versions()), flush=True)
    return int(not all([measure_row(name, args, deadline, table) for name in args.rows]))


if __name__ == "__main__":
    sys.exit(main())
