"""Measure steps per second of our environments and their peers, including actions, resets, observations and infos.

    python benchmarks/env_speed.py [--out speed.png] [--threads 1 2] [--device cuda] [--works NAME …] [--smoke]
    python benchmarks/env_speed.py --draw docs/speed.md --title TEXT --out speed.png    # plot an existing table
    pip install mpe2 vmas jax jaxmarl      # the peers; missing ones are left out

Each row is measured several times in its own process, bound to as many cores as it has threads. The table lists the
medians. SimpleTag has one learner (a predator), three prey with random actions and 128 steps per episode. In the peers
and in the rows "all agents observe", all four agents act at random and observe. A row fails only if it raises an error
or times out.

Vector environments are limited by memory: the bytes of tokens and state that a step must write and read, divided by the
bandwidth of a copy measured in the same run. Single environments are limited by the overhead of NumPy calls.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import players
from players import EPISODE, Play, Work

from noisy_envs.training.files import write_atomically
from noisy_envs.training.versions import current_commit

TAG, CENTROID, BOX = "noisy_envs/SimpleTag", "noisy_envs/SimpleCentroid", "noisy_envs/BoxWorld"
LARGE = {"size": 12, "goal_length": 4, "num_distractors": 3, "distractor_length": 2}
MAIN = "SimpleTag 1v3v28"
WORKS = {
    work.name: work
    for work in (
        *(Work(f"SimpleTag 1v3v{n}", f"{TAG}-1v3v28-v0", {"num_obstacles": n}) for n in (0, 4, 12)),
        Work(MAIN, f"{TAG}-1v3v28-v0"),
        Work("SimpleTag 1v3v64", f"{TAG}-1v3v28-v0", {"num_obstacles": 64}),
        Work("SimpleTag 1v3v28, solid", f"{TAG}-1v3v28-v0", {"collidable_obstacles": True}),
        Work("SimpleCentroid 1v31v0", f"{CENTROID}-1v31v0-v0"),
        Work("SimpleCentroid 1v3v28", f"{CENTROID}-1v3v28-v0"),
        Work("BoxWorld entities", f"{BOX}Entities-v0"),
        Work("BoxWorld pixels", f"{BOX}Pixels-v0"),
        Work("BoxWorld 12×12", f"{BOX}-v0", LARGE),
    )
}
GROWTH = [f"SimpleTag 1v3v{n}" for n in (0, 4, 12, 28, 64)]
GROWTH_WORLDS = 1024
TOKENS = 32 * 5 * 4  # bytes of an observation of the main workload


class Engine(NamedTuple):
    """An implementation, and the workloads that it is measured on."""

    make: Callable[[Work, int, str], Play]
    fits: Callable[[Work, int], bool]
    peer: bool = False
    threaded: bool = False  # whether it can use several threads
    devices: tuple[str, ...] = ("cpu",)
    everywhere: bool = False  # whether it runs all workloads by default, or the main one alone
    most: int = 2**20  # environments on a CPU; more take minutes


def tag(work: Work, worlds: int) -> bool:
    """Return whether a workload is SimpleTag."""
    return work.env_id.startswith(TAG)


def one(work: Work, worlds: int) -> bool:
    """Return whether there is one environment."""
    return worlds == 1


def some(work: Work, worlds: int) -> bool:
    """Return whether the environments are few enough for one process or object each."""
    return worlds == 64


def many(work: Work, worlds: int) -> bool:
    """Return whether there are several environments."""
    return worlds > 1


def compiling(work: Work, worlds: int) -> bool:
    """Return whether there are enough environments to make compilation worthwhile."""
    return worlds >= 1024


BOTH = ("cpu", "cuda")
ENGINES = {
    "one world": Engine(players.one_world, one, everywhere=True),
    "one world, in contact all the time": Engine(players.in_contact, lambda w, n: n == 1 and w.name == MAIN),
    "levels drawn, not steps": Engine(
        players.levels_drawn, lambda w, n: n == 1 and "BoxWorld" in w.name, everywhere=True
    ),
    "Gymnasium's SyncVectorEnv": Engine(players.processes("sync"), some),
    "Gymnasium's AsyncVectorEnv": Engine(players.processes("async"), some, threaded=True),
    "NumPy": Engine(players.vector(), many, everywhere=True),
    "NumPy, copy=False": Engine(players.vector(copy=False), many),
    "NumPy, all agents observe": Engine(players.vector(learners="all"), lambda w, n: tag(w, n) and n > 1),
    "torch": Engine(players.vector("torch"), compiling, devices=BOTH),
    "compiled": Engine(players.vector("torch", compile=True), compiling, threaded=True, devices=BOTH),
    "compiled, copy=False": Engine(
        players.vector("torch", compile=True, copy=False), compiling, threaded=True, devices=BOTH
    ),
    "compiled, all agents observe": Engine(
        players.vector("torch", compile=True, learners="all"),
        lambda w, n: tag(w, n) and n >= 1024,
        threaded=True,
        devices=BOTH,
    ),
    "pure_step in a CUDA graph": Engine(players.recorded, compiling, devices=("cuda",)),
    "MPE2": Engine(players.mpe2, lambda w, n: tag(w, n) and n == 1, peer=True, everywhere=True),
    "VMAS, one substep": Engine(players.vmas, tag, peer=True, threaded=True, devices=BOTH, everywhere=True),
    "JaxMARL": Engine(players.jaxmarl, tag, peer=True, threaded=True, devices=BOTH, everywhere=True, most=4096),
}
# Colours and markers of the engines in the figure, which shows one thread each; the table lists all.
LOOKS = {
    "one world": ("#1f77b4", "o"), "NumPy": ("#1f77b4", "s"), "torch": ("#9467bd", "^"), "compiled": ("#d62728", "D"),
    "NumPy, all agents observe": ("#17becf", "v"), "compiled, all agents observe": ("#ff7f0e", "P"),
    "pure_step in a CUDA graph": ("#2ca02c", "X"), "Gymnasium's SyncVectorEnv": ("#8c564b", "<"),
    "Gymnasium's AsyncVectorEnv": ("#bcbd22", ">"), "MPE2": ("#e377c2", "*"), "VMAS, one substep": ("#555555", "h"),
    "JaxMARL": ("#000000", "d"),
}  # fmt: skip
PACKAGES = {"MPE2": "mpe2", "VMAS, one substep": "vmas", "JaxMARL": "jaxmarl"}
WORLDS = {"cpu": (1, 64, 1024, 4096, 65536), "cuda": (4096, 16384, 65536, 1048576)}
ELSEWHERE = {"cpu": (1, 4096), "cuda": (65536,)}  # environments, for all workloads but the main one


class Row(NamedTuple):
    """One measurement, which runs in its own process."""

    work: str
    engine: str
    worlds: int
    threads: int
    device: str


class Result(NamedTuple):
    """Steps per second, one figure per repeat."""

    row: Row
    rates: list[float]

    @property
    def median(self) -> float:
        """Return the median rate."""
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """Return the range of the rates divided by their median."""
        return (max(self.rates) - min(self.rates)) / self.median


def rates(play: Play, repeats: int, least: float) -> list[float]:
    """Return steps per second, one figure per repeat of at least `least / 2` seconds, after a warm-up."""
    play(EPISODE + 2)
    count = EPISODE  # whole episodes, so that each figure includes resets
    measured: list[float] = []
    while len(measured) < repeats:
        start = time.perf_counter()
        played = play(count)
        elapsed = time.perf_counter() - start
        if elapsed < least / 2:
            count *= 2
        else:
            measured.append(played / elapsed)
    return measured


def plan(args: argparse.Namespace, missing: set[str]) -> Iterator[Row]:
    """Yield the rows to measure."""
    for work in WORKS.values():
        main = work.name == MAIN or args.worlds
        given = args.worlds or (WORLDS if main else ELSEWHERE)[args.device]
        growing = () if args.worlds or args.device == "cuda" or work.name not in GROWTH else (GROWTH_WORLDS,)
        for worlds in sorted({*given, *growing}):
            for name, engine in ENGINES.items():
                selected = work.name in args.works and name in args.engines and PACKAGES.get(name) not in missing
                supported = args.device in engine.devices and (worlds <= engine.most or args.device == "cuda")
                if selected and supported and (main or engine.everywhere) and engine.fits(work, worlds):
                    for threads in args.threads if engine.threaded and main else args.threads[:1]:
                        yield Row(work.name, name, worlds, threads, args.device)


def measure(row: Row, args: argparse.Namespace) -> Result:
    """Measure a row in its own process.

    Raises:
        RuntimeError: the process failed; the message is its last error line.
    """
    command = [sys.executable, __file__, "--row", json.dumps(row), "--repeats", str(args.repeats)]
    extra = {"OMP_NUM_THREADS": str(row.threads), "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONWARNINGS": "ignore"}
    if row.device == "cpu":
        extra["JAX_PLATFORMS"] = "cpu"
    try:
        done = subprocess.run(
            [*command, "--least", str(args.least)], env={**os.environ, **extra},
            capture_output=True, text=True, timeout=args.timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took more than {args.timeout:g} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(next((line for line in reversed(lines) if "Error" in line), lines[-1]))
    return Result(row, json.loads(done.stdout.splitlines()[-1]))


def play_row(row: Row, repeats: int, least: float) -> None:
    """Measure a row in this process and print its rates."""
    if row.device == "cpu" and sys.platform == "linux":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: row.threads])
    play = ENGINES[row.engine].make(WORKS[row.work], row.worlds, row.device)
    print(json.dumps(rates(play, repeats, least)))


def best_peer(result: Result, results: Sequence[Result]) -> Result | None:
    """Return the fastest peer with the same workload and number of environments, or else with the same workload."""
    peers = [other for other in results if ENGINES[other.row.engine].peer and other.row.work == result.row.work]
    equal = [other for other in peers if other.row.worlds == result.row.worlds] or peers
    return max(equal, key=lambda other: other.median, default=None)


def table(results: Sequence[Result]) -> str:
    """Format the results as a Markdown table."""
    lines = ["| work | worlds | who | threads | steps/s | spread | × the best peer |", "|---|---|---|---|---|---|---|"]
    for result in results:
        row, peer = result.row, best_peer(result, results)
        times = "" if peer is None or ENGINES[row.engine].peer else f"{result.median / peer.median:,.1f}"
        if times and peer is not None and peer.row.worlds != row.worlds:
            times += f" (its {peer.row.worlds:,} worlds)"
        lines.append(
            f"| {row.work} | {row.worlds:,} | {row.engine} | {row.threads} | {result.median:,.0f} "
            f"| {result.spread:.0%} | {times} |"
        )
    return "\n".join(lines)


def read_table(text: str) -> list[Result]:
    """Parse the medians from a text with a table as `table` writes it.

    Raises:
        ValueError: the text has no row of the table.
    """
    results = []
    for line in text.splitlines():
        work, worlds, engine, threads, median, *_ = [*(cell.strip() for cell in line.split("|")[1:]), *[""] * 5]
        if work in WORKS and engine in ENGINES:
            row = Row(work, engine, int(worlds.replace(",", "")), int(threads), "")
            results.append(Result(row, [float(median.replace(",", ""))]))
    if not results:
        raise ValueError("expected a table in the format of env_speed.py")
    return results


def as_csv(results: Sequence[Result]) -> str:
    """Format the results as CSV, one row each."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*Row._fields, "median", "least", "most"])
    for result in results:
        writer.writerow([*result.row, result.median, min(result.rates), max(result.rates)])
    return text.getvalue()


def draw(path: Path, results: Sequence[Result], title: str) -> None:
    """Plot rates against the number of environments, step time against obstacles, and single environments."""
    from matplotlib.figure import Figure

    from noisy_envs.training.plots import write_png

    figure = Figure(figsize=(14, 5.6), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=10)
    over_worlds, over_noise, singles = figure.subplots(1, 3)

    threads = min(result.row.threads for result in results)

    def lines(axes: Any, keep: Callable[[Row], bool], x: Callable[[Row], float], y: Callable[[Result], float]) -> None:
        groups: dict[str, list[Result]] = {}
        for result in results:
            if keep(result.row) and result.row.engine in LOOKS and result.row.threads == threads:
                groups.setdefault(result.row.engine, []).append(result)
        for name, group in groups.items():
            color, marker = LOOKS[name]
            dashes = "--" if ENGINES[name].peer else "-"
            axes.plot(
                [x(one.row) for one in group], [y(one) for one in group], dashes,
                color=color, marker=marker, markersize=7, label=name,
            )  # fmt: skip
        axes.grid(alpha=0.25)

    lines(over_worlds, lambda row: row.work == MAIN, lambda row: row.worlds, lambda result: result.median)
    over_worlds.set(
        xscale="log", yscale="log", xlabel="environments", ylabel="steps/s", title=f"{MAIN}, threads: {threads}"
    )
    lines(
        over_noise,
        lambda row: row.work in GROWTH and row.worlds == GROWTH_WORLDS,
        lambda row: float(row.work.rpartition("v")[2]),
        lambda result: 1e6 / result.median,
    )
    over_noise.set(
        yscale="log", xlabel="obstacles", ylabel="µs per environment step",
        title=f"SimpleTag 1v3vN, {GROWTH_WORLDS:,} environments",
    )  # fmt: skip
    alone = [one for one in results if one.row.worlds == 1 and one.row.engine in ("one world", "MPE2")]
    names = [f"{one.row.work}{', MPE2' if one.row.engine == 'MPE2' else ''}" for one in alone]
    singles.barh(names, [one.median for one in alone], color=[LOOKS[one.row.engine][0] for one in alone])
    for place, result in enumerate(alone):
        singles.text(result.median, place, f" {result.median:,.0f}", va="center", fontsize=8)
    singles.margins(x=0.2)
    singles.invert_yaxis()
    singles.set(xlabel="steps/s", title="one environment")
    labels = {label: line for axes in (over_worlds, over_noise) for line in axes.lines for label in [line.get_label()]}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=5, fontsize=8)
    write_png(path, figure)


def copy_bandwidth(device: str) -> float:
    """Return the bytes read and written per second while copying an array larger than the caches."""
    if device == "cuda":
        import torch

        tensor = torch.ones(2**28, device=device)
        into = torch.empty_like(tensor)
        size = tensor.nbytes

        def copy() -> None:
            into.copy_(tensor)
            torch.cuda.synchronize()
    else:
        source = np.ones(2**25, np.float32)
        target = np.empty_like(source)
        size = source.nbytes

        def copy() -> None:
            np.copyto(target, source)

    times = []
    for _ in range(7):
        start = time.perf_counter()
        copy()
        times.append(time.perf_counter() - start)
    return 2 * size / statistics.median(times)


def machine(device: str) -> str:
    """Return the name of the processor or GPU."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=BOTH, default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads to measure")
    parser.add_argument("--worlds", type=int, nargs="+", help="numbers of environments, for all workloads")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS), metavar="NAME", help="workloads")
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="NAME", help="implementations"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--least", type=float, default=0.4, help="seconds per repeat")
    parser.add_argument("--timeout", type=float, default=300, help="seconds per row")
    parser.add_argument("--out", type=Path, help="PNG to write; the rates go to .csv and .md files of that name")
    parser.add_argument("--draw", type=Path, help="plot the table in this Markdown file, without measuring")
    parser.add_argument("--title", default="", help="title of the figure, with --draw")
    parser.add_argument("--smoke", action="store_true", help="run each engine briefly, to check that it works")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.smoke:
        args.repeats, args.least, args.threads = 1, 0.0, args.threads[:1]
    if min(*args.threads, *(args.worlds or [1]), args.repeats) < 1:
        parser.error(f"threads={args.threads}, worlds={args.worlds}, repeats={args.repeats}: expected at least 1")
    if max(args.threads) > (os.cpu_count() or 1):
        parser.error(f"threads={max(args.threads)}: expected at most {os.cpu_count()}, the number of CPUs")
    if args.draw is not None and args.out is None:
        parser.error("--draw requires --out")
    if args.out is not None and args.out.suffix != ".png":
        parser.error(f"out='{args.out}': expected a name that ends in .png")
    return args


def smallest(rows: Sequence[Row]) -> list[Row]:
    """Return one row per engine, with the fewest environments."""
    by_engine: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row.worlds):
        by_engine.setdefault(row.engine, row)
    return list(by_engine.values())


def main(argv: Sequence[str]) -> None:
    """Measure all rows and print a table, or plot an existing one."""
    args = parse(argv)
    if args.row:
        play_row(Row(*json.loads(args.row)), args.repeats, args.least)
        return
    if args.draw is not None:
        draw(args.out, read_table(args.draw.read_text(encoding="utf-8")), args.title)
        return
    versions = players.versions()
    missing = {name for name, version in versions.items() if version == "missing"}
    bandwidth, (kept, fixed) = copy_bandwidth(args.device), players.bytes_of(WORKS[MAIN])
    step_bytes = 2 * kept - fixed + TOKENS
    title = f"{machine(args.device)}, Python {platform.python_version()}, commit {current_commit()}: " + ", ".join(
        f"{name} {version}" for name, version in versions.items() if name not in missing
    )
    print(title)
    if absent := sorted(missing & set(PACKAGES.values())):
        print(f"skipped, not installed: {', '.join(absent)}")
    print(
        f"Memory copies run at {bandwidth / 1e9:,.1f} GB/s. An environment of {MAIN} takes {kept} bytes. A step reads "
        f"and writes {step_bytes} bytes, {TOKENS} of them tokens: at most {bandwidth / step_bytes:,.0f} steps/s.",
        flush=True,
    )
    rows = list(plan(args, missing))
    results = []
    for row in smallest(rows) if args.smoke else rows:
        name = f"{row.work}, environments: {row.worlds:,}, threads: {row.threads}, {row.engine}"
        try:
            result = measure(row, args)
        except RuntimeError as error:
            print(f"{name}: failed, {error}", flush=True)
            continue
        results.append(result)
        print(f"{name}: {result.median:,.0f} steps/s, spread {result.spread:.0%}", flush=True)
    text = table(results)
    print("\n" + text)
    if args.out is not None:
        draw(args.out, results, title)
        write_atomically(args.out.with_suffix(".csv"), as_csv(results).encode())
        write_atomically(args.out.with_suffix(".md"), f"{title}\n\n{text}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
