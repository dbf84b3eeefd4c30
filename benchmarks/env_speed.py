"""Steps a second of our environments and of their peers, everything included: actions, resets, observations, infos.

    python benchmarks/env_speed.py [--out speed.png] [--threads 1 2] [--device cuda] [--works NAME …] [--smoke]
    python benchmarks/env_speed.py --draw docs/speed.md --title TEXT --out speed.png    # of a table that is there
    pip install mpe2 vmas jax jaxmarl      # the peers: those that are missing are left out

Each row is measured in a process of its own, bound to as many cores as it has threads, several times; the table has
medians. A world of SimpleTag is played with one predator that learns, three prey that act at random and 128 steps an
episode; a peer's with four agents that act at random, all of which observe (ours in the rows "all agents observe").
Rows fail or are left out by name, never for being slow.

The limit of a vector is memory: the bytes of tokens and state that a step must write and read, over the bandwidth of a
copy measured in the same run. A single world is bound by the overhead of NumPy's calls instead.
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
TOKENS = 32 * 5 * 4  # bytes of an observation of the main work


class Engine(NamedTuple):
    """Who plays, and what it is measured at."""

    make: Callable[[Work, int, str], Play]
    fits: Callable[[Work, int], bool]
    peer: bool = False
    threaded: bool = False  # whether more threads are of use
    devices: tuple[str, ...] = ("cpu",)
    everywhere: bool = False  # whether it plays all works, where not asked for, or the main one alone
    most: int = 2**20  # worlds on a CPU: more take minutes


def tag(work: Work, worlds: int) -> bool:
    """Tell whether a work is SimpleTag."""
    return work.env_id.startswith(TAG)


def one(work: Work, worlds: int) -> bool:
    """Tell whether there is but one world."""
    return worlds == 1


def some(work: Work, worlds: int) -> bool:
    """Tell whether the worlds are few enough for a process or an object each."""
    return worlds == 64


def many(work: Work, worlds: int) -> bool:
    """Tell whether there are several worlds."""
    return worlds > 1


def compiling(work: Work, worlds: int) -> bool:
    """Tell whether the worlds are enough to pay for compiling."""
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
# What the figure shows, of one thread each, and how; the table has all.
LOOKS = {
    "one world": ("#1f77b4", "o"), "NumPy": ("#1f77b4", "s"), "torch": ("#9467bd", "^"), "compiled": ("#d62728", "D"),
    "NumPy, all agents observe": ("#17becf", "v"), "compiled, all agents observe": ("#ff7f0e", "P"),
    "pure_step in a CUDA graph": ("#2ca02c", "X"), "Gymnasium's SyncVectorEnv": ("#8c564b", "<"),
    "Gymnasium's AsyncVectorEnv": ("#bcbd22", ">"), "MPE2": ("#e377c2", "*"), "VMAS, one substep": ("#555555", "h"),
    "JaxMARL": ("#000000", "d"),
}  # fmt: skip
PACKAGES = {"MPE2": "mpe2", "VMAS, one substep": "vmas", "JaxMARL": "jaxmarl"}
WORLDS = {"cpu": (1, 64, 1024, 4096, 65536), "cuda": (4096, 16384, 65536, 1048576)}
ELSEWHERE = {"cpu": (1, 4096), "cuda": (65536,)}  # worlds of all works but the main one


class Row(NamedTuple):
    """What is measured in one process."""

    work: str
    engine: str
    worlds: int
    threads: int
    device: str


class Result(NamedTuple):
    """Steps a second, one figure a repeat."""

    row: Row
    rates: list[float]

    @property
    def median(self) -> float:
        """Return the middle one."""
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """Return what lies between the most and the least, as a share of the median."""
        return (max(self.rates) - min(self.rates)) / self.median


def rates(play: Play, repeats: int, least: float) -> list[float]:
    """Return steps a second, a figure a repeat of at least `least` seconds, after a warm-up of more than an episode."""
    play(EPISODE + 2)
    count = EPISODE  # whole episodes: each figure has its share of resets
    figures: list[float] = []
    while len(figures) < repeats:
        start = time.perf_counter()
        played = play(count)
        elapsed = time.perf_counter() - start
        if elapsed < least / 2:
            count *= 2
        else:
            figures.append(played / elapsed)
    return figures


def plan(args: argparse.Namespace, missing: set[str]) -> Iterator[Row]:
    """Name the rows to measure."""
    for work in WORKS.values():
        main = work.name == MAIN or args.worlds
        given = args.worlds or (WORLDS if main else ELSEWHERE)[args.device]
        growing = () if args.worlds or args.device == "cuda" or work.name not in GROWTH else (GROWTH_WORLDS,)
        for worlds in sorted({*given, *growing}):
            for name, engine in ENGINES.items():
                asked = work.name in args.works and name in args.engines and PACKAGES.get(name) not in missing
                able = args.device in engine.devices and (worlds <= engine.most or args.device == "cuda")
                if asked and able and (main or engine.everywhere) and engine.fits(work, worlds):
                    for threads in args.threads if engine.threaded and main else args.threads[:1]:
                        yield Row(work.name, name, worlds, threads, args.device)


def measure(row: Row, args: argparse.Namespace) -> Result:
    """Measure a row in a process of its own.

    Raises:
        RuntimeError: it failed; the message is the last error that it wrote.
    """
    words = [sys.executable, __file__, "--row", json.dumps(row), "--repeats", str(args.repeats)]
    alone = {"OMP_NUM_THREADS": str(row.threads), "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONWARNINGS": "ignore"}
    if row.device == "cpu":
        alone["JAX_PLATFORMS"] = "cpu"
    try:
        done = subprocess.run(
            [*words, "--least", str(args.least)], env={**os.environ, **alone},
            capture_output=True, text=True, timeout=args.timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took more than {args.timeout:g} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(next((line for line in reversed(lines) if "Error" in line), lines[-1]))
    return Result(row, json.loads(done.stdout.splitlines()[-1]))


def play_row(row: Row, repeats: int, least: float) -> None:
    """Measure a row in this process, and print its figures."""
    if row.device == "cpu" and sys.platform == "linux":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: row.threads])
    play = ENGINES[row.engine].make(WORKS[row.work], row.worlds, row.device)
    print(json.dumps(rates(play, repeats, least)))


def best_peer(result: Result, results: Sequence[Result]) -> Result | None:
    """Return the fastest peer at the same work and number of worlds, or else at the work."""
    peers = [other for other in results if ENGINES[other.row.engine].peer and other.row.work == result.row.work]
    beside = [other for other in peers if other.row.worlds == result.row.worlds] or peers
    return max(beside, key=lambda other: other.median, default=None)


def table(results: Sequence[Result]) -> str:
    """Return the table in Markdown."""
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
    """Return the medians that a text holds as `table` writes them.

    Raises:
        ValueError: there are none.
    """
    found = []
    for line in text.splitlines():
        work, worlds, engine, threads, median, *_ = [*(cell.strip() for cell in line.split("|")[1:]), *[""] * 5]
        if work in WORKS and engine in ENGINES:
            row = Row(work, engine, int(worlds.replace(",", "")), int(threads), "")
            found.append(Result(row, [float(median.replace(",", ""))]))
    if not found:
        raise ValueError("must hold a table as this program writes it")
    return found


def as_csv(results: Sequence[Result]) -> str:
    """Return the results as CSV: a row each, with its figures."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*Row._fields, "median", "least", "most"])
    for result in results:
        writer.writerow([*result.row, result.median, min(result.rates), max(result.rates)])
    return text.getvalue()


def draw(path: Path, results: Sequence[Result], title: str) -> None:
    """Draw steps a second over worlds, the time of a step over obstacles, and single worlds."""
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
        for name, found in groups.items():
            colour, marker = LOOKS[name]
            dashes = "--" if ENGINES[name].peer else "-"
            axes.plot(
                [x(one.row) for one in found], [y(one) for one in found], dashes,
                color=colour, marker=marker, markersize=7, label=name,
            )  # fmt: skip
        axes.grid(alpha=0.25)

    lines(over_worlds, lambda row: row.work == MAIN, lambda row: row.worlds, lambda result: result.median)
    over_worlds.set(
        xscale="log", yscale="log", xlabel="worlds", ylabel="steps/s of all worlds", title=f"{MAIN}, threads: {threads}"
    )
    lines(
        over_noise,
        lambda row: row.work in GROWTH and row.worlds == GROWTH_WORLDS,
        lambda row: float(row.work.rpartition("v")[2]),
        lambda result: 1e6 / result.median,
    )
    over_noise.set(
        yscale="log", xlabel="obstacles", ylabel="µs a step of one world",
        title=f"SimpleTag 1v3vN, {GROWTH_WORLDS:,} worlds",
    )  # fmt: skip
    alone = [one for one in results if one.row.worlds == 1 and one.row.engine in ("one world", "MPE2")]
    names = [f"{one.row.work}{', MPE2' if one.row.engine == 'MPE2' else ''}" for one in alone]
    singles.barh(names, [one.median for one in alone], color=[LOOKS[one.row.engine][0] for one in alone])
    for place, result in enumerate(alone):
        singles.text(result.median, place, f" {result.median:,.0f}", va="center", fontsize=8)
    singles.margins(x=0.2)
    singles.invert_yaxis()
    singles.set(xlabel="steps/s", title="one world")
    labels = {label: line for axes in (over_worlds, over_noise) for line in axes.lines for label in [line.get_label()]}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=5, fontsize=8)
    write_png(path, figure)


def copy_bandwidth(device: str) -> float:
    """Return bytes a second, read and written, of copying an array larger than the caches."""
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
    """Name the processor."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=BOTH, default="cpu")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of engines that can use several")
    parser.add_argument("--worlds", type=int, nargs="+", help="for all works, instead of a choice for each")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS), metavar="NAME", help="what is played")
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="NAME", help="who plays"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--least", type=float, default=0.4, help="seconds of a repeat")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a row")
    parser.add_argument("--out", type=Path, help="PNG to draw; the figures go beside it, as .csv and .md")
    parser.add_argument("--draw", type=Path, help="measure nothing, and draw the table of this Markdown file")
    parser.add_argument("--title", default="", help="of the figure that --draw draws")
    parser.add_argument("--smoke", action="store_true", help="a moment of each engine, to see that it runs")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.smoke:
        args.repeats, args.least, args.threads = 1, 0.0, args.threads[:1]
    if min(*args.threads, *(args.worlds or [1]), args.repeats) < 1:
        parser.error("--threads, --worlds and --repeats must be at least 1")
    if max(args.threads) > (os.cpu_count() or 1):
        parser.error(f"--threads {max(args.threads)}: must be at most the {os.cpu_count()} of this machine")
    if args.draw is not None and args.out is None:
        parser.error("--draw needs --out")
    if args.out is not None and args.out.suffix != ".png":
        parser.error(f"--out {args.out}: must end in .png")
    return args


def smallest(rows: Sequence[Row]) -> list[Row]:
    """Return one row of each engine, the one with the fewest worlds."""
    found: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row.worlds):
        found.setdefault(row.engine, row)
    return list(found.values())


def main(argv: Sequence[str]) -> None:
    """Measure row by row, print a table, and draw it if asked to."""
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
        print(f"not installed, so left out: {', '.join(absent)}")
    print(
        f"A copy runs at {bandwidth / 1e9:,.1f} GB/s. A world of {MAIN} keeps {kept} bytes. A step reads and writes "
        f"{step_bytes}, {TOKENS} of them tokens, of which the memory allows {bandwidth / step_bytes:,.0f} a second.",
        flush=True,
    )
    rows = list(plan(args, missing))
    results = []
    for row in smallest(rows) if args.smoke else rows:
        name = f"{row.work}, worlds: {row.worlds:,}, threads: {row.threads}, {row.engine}"
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
