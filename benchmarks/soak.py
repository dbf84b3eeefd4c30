"""Play a billion random steps of each game, on NumPy or torch, and check for faults that appear only late.

    python benchmarks/soak.py [--steps 1_000_000_000] [--num-envs 4096] [--backend torch] [--device cuda] [--out soak]

A step is one step of one environment; a call that resets the environment does not count. Each step checks:

* rewards: finite, within the game's range, and 0 in the call that resets;
* ends: truncated after exactly `max_steps` and never later, terminated exactly where the game's rules say so.

Every 16th call (`EVERY`) checks the share of signal, and that observations are finite and in their space. The last
check compares the environments' own counters: episode number, steps and seed. Memory is measured after a tenth of the
steps and at the end: the process, Python objects, and tensors on a GPU. Results stay on the device and are read every
256 calls (`CALLS`). The exit status is 1 if any check failed.

With `--out` each finished game's row is written to that folder, with a table of all rows in it. The same command plays
only the missing games. Ctrl-C stops after the calls in progress and keeps the row of the steps played so far.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from env_speed import machine
from tqdm import tqdm

from noisy_envs import ENVIRONMENTS
from noisy_envs.arrays import Array, namespace
from noisy_envs.games.box_world import DISTRACTOR_REWARD, GEM_REWARD
from noisy_envs.games.simple_tag import CATCH
from noisy_envs.training.checkpoint import read_summary
from noisy_envs.training.files import write_atomically
from noisy_envs.training.process import EXIT_INTERRUPTED, on_stop_signal, write_stderr
from noisy_envs.training.versions import current_commit

GAMES = ("noisy_envs/SimpleCentroid-1v3v28-v0", "noisy_envs/SimpleTag-1v3v28-v0", "noisy_envs/BoxWorldEntities-v0")
CALLS = 256  # calls between two readings of the results
EVERY = 16  # calls between two checks of observations; odd episode lengths (129, 31 calls) cover every step
MOST_GROWTH = 16 * 2**20  # bytes of the process, from the first tenth on; allocators vary by less
COLUMNS = (
    "env_id", "backend", "device", "num_envs", "steps", "episodes", "truncated", "terminated", "solved", "reward",
    "observations", "memory_mib", "objects", "gpu_mib", "faults", "steps_per_second", "commit",
)  # fmt: skip


def reward_range(game: Any) -> tuple[float, float]:
    """Return the lowest and the highest reward of the first agent in a step."""
    if game.name == "box_world":
        return DISTRACTOR_REWARD, GEM_REWARD
    if game.name == "simple_tag":
        catchers = game.num_predators if game.reward_sharing == "shared" else 1
        return 0.0, CATCH * catchers * game.num_prey
    _, high = game.observation_bounds
    farthest = math.hypot(high[0, 0], high[0, 1]) * game.observation_scale
    return -game.reward_scale * math.sqrt(farthest), 0.0


def expected_end(game: Any, reward: Array) -> tuple[Array, Array]:
    """Return from the rewards (B,) alone which environments terminate and which are solved, (B,) each."""
    solved = reward == GEM_REWARD
    if not game.terminates:
        return solved & False, solved & False
    return solved | (reward == DISTRACTOR_REWARD), solved


class Watch:
    """Counts of steps, ends and faults of `B` environments, in arrays (B,) on their device."""

    def __init__(self, envs: Any) -> None:
        """Start to watch environments that were just reset."""
        self.game, self.limit = envs.game, envs.max_steps
        self.low, self.high = reward_range(envs.game)
        tokens = envs.game.observation_bounds
        like = envs.batch_state.clock
        xp = namespace(like)
        self.bounds = [xp.asarray(bound, device=like.device) for bound in tokens]
        self.age, self.resets, self.truncated, self.terminated, self.solved = (xp.zeros_like(like) for _ in range(5))
        self.faults: dict[str, Array] = {}
        self.least, self.most, self.paid = (xp.zeros(like.shape, dtype=xp.float64, device=like.device) for _ in "123")
        self.ended = xp.zeros(like.shape, dtype=xp.bool, device=like.device)
        self.calls = self.looks = 0

    def count(self, fault: str, where: Array) -> None:
        """Count a fault in the environments where it occurs, bool (B,)."""
        self.faults[fault] = self.faults.get(fault, 0) + where

    def see(self, reward: Array, terminated: Array, truncated: Array) -> None:
        """Check the results of a step of each environment, (B,) each."""
        xp, fresh = namespace(reward), self.ended
        self.calls += 1
        self.age = (self.age + 1) * ~fresh
        over, solved = expected_end(self.game, reward)
        self.count("nonzero reward at a reset", fresh & (reward != 0))
        self.count("end at a reset", fresh & (terminated | truncated))
        self.count("truncated early", truncated & (self.age != self.limit))
        self.count("time limit exceeded", ~terminated & ~truncated & (self.age >= self.limit))
        self.count("wrong termination", terminated != over)
        self.count("terminated and truncated", terminated & truncated)
        self.count("reward out of range", ~((reward >= self.low) & (reward <= self.high)))  # true for NaN
        self.least, self.most = xp.minimum(self.least, reward), xp.maximum(self.most, reward)
        self.paid, self.resets = self.paid + reward, self.resets + fresh
        self.truncated, self.terminated = self.truncated + truncated, self.terminated + terminated
        self.solved, self.ended = self.solved + solved, terminated | truncated

    def look(self, tokens: Array, snr: Array) -> None:
        """Check observations (B, ...) and shares of signal (B,)."""
        low, high = self.bounds
        self.looks += 1
        inside = ((tokens >= low) & (tokens <= high)).reshape(len(tokens), -1)  # false for NaN
        self.count("observation outside its space", ~inside.all(axis=1))
        self.count("snr out of range", ~((snr > 0) & (snr <= 1)))

    def compare(self, envs: Any, seed: int) -> None:
        """Check the environments' own counters."""
        worlds = envs.batch_state
        first = namespace(worlds.seed).arange(seed, seed + len(worlds.seed), device=worlds.seed.device)
        self.count("episode number", worlds.number != self.resets)
        self.count("episode step", worlds.clock != self.age)
        self.count("seed", worlds.seed != first)

    @property
    def played(self) -> int:
        """Number of steps so far; waits for the GPU."""
        return self.calls * len(self.age) - int(self.resets.sum())

    def fault_counts(self) -> dict[str, int]:
        """Return the number of occurrences of each fault that occurred."""
        counts = {fault: int(where.sum()) for fault, where in self.faults.items()}
        return {fault: count for fault, count in counts.items() if count}


def action_sampler(envs: Any, seed: int) -> Callable[[], Array]:
    """Return a function that draws random actions for all environments, on their device."""
    shape, continuous, count = envs.action_space.shape, envs.game.continuous_actions, envs.game.num_actions
    if envs.backend == "numpy":
        numbers = np.random.default_rng(seed)
        if continuous:
            return lambda: numbers.random(shape, np.float32)
        return lambda: numbers.integers(0, count, shape)
    import torch

    generator = torch.Generator(envs.device).manual_seed(seed)
    if continuous:
        return lambda: torch.rand(shape, generator=generator, device=envs.device)
    return lambda: torch.randint(0, count, shape, generator=generator, device=envs.device)


def memory(device: str) -> dict[str, int]:
    """Return the bytes of the process, its number of Python memory blocks, and the bytes of tensors on a GPU."""
    gc.collect()
    gpu = 0
    if device != "cpu":
        import torch

        gpu = torch.cuda.memory_allocated()
    return {"rss": resident(), "objects": sys.getallocatedblocks(), "gpu": gpu}


def resident() -> int:
    """Return the resident bytes of the process: their peak on macOS, 0 on Windows."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def soak(env_id: str, args: argparse.Namespace, stopping: list[int]) -> dict[str, Any]:
    """Play a game until its steps are done or `stopping` is not empty, and return its row."""
    options = {} if args.backend == "numpy" else {"backend": "torch", "device": args.device, "compile": args.compile}
    envs: Any = gymnasium.make_vec(env_id, args.num_envs, copy=False, **options)
    envs.reset(seed=args.seed)
    watch, draw = Watch(envs), action_sampler(envs, args.seed)
    start, played, before = time.perf_counter(), 0, None
    with tqdm(
        total=args.steps, unit=" steps", unit_scale=True, desc=env_id.partition("/")[2], dynamic_ncols=True,
        mininterval=0.5 if sys.stderr.isatty() else 15,
    ) as bar:  # fmt: skip
        while played < args.steps:
            for _ in range(CALLS):
                tokens, reward, terminated, truncated, info = envs.step(draw())
                watch.see(reward, terminated, truncated)
                if watch.calls % EVERY == 0:
                    watch.look(tokens, info["snr"])
            played = watch.played
            bar.update(played - bar.n)
            if before is None and played >= args.steps / 10:
                before = memory(args.device)
            if watch.fault_counts() or stopping:  # checked here, so that a row has at least one step
                break
    seconds = time.perf_counter() - start
    after = memory(args.device)
    watch.compare(envs, args.seed)
    faults = watch.fault_counts() | growth(before or after, after)
    return row_of(env_id, args, watch, seconds) | {"before": before, "after": after, "faults": faults}


def growth(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Return the growth of each kind of memory that exceeds its limit."""
    most = {"rss": MOST_GROWTH, "objects": CALLS, "gpu": 0}  # less than one object per thousand calls
    return {f"growth of {kind}": after[kind] - before[kind] for kind in most if after[kind] - before[kind] > most[kind]}


def row_of(env_id: str, args: argparse.Namespace, watch: Watch, seconds: float) -> dict[str, Any]:
    """Return the row of a game, without memory and faults."""
    counts = {name: int(getattr(watch, name).sum()) for name in ("truncated", "terminated", "solved")}
    played = watch.played
    return {
        "env_id": env_id, "backend": args.backend, "device": args.device, "compile": args.compile,
        "num_envs": args.num_envs, "seed": args.seed, "steps": played, "seconds": seconds,
        "episodes": counts["truncated"] + counts["terminated"], **counts, "limit": watch.limit,
        "reward_least": float(watch.least.min()), "reward_most": float(watch.most.max()),
        "reward_range": [watch.low, watch.high], "reward_mean": float(watch.paid.sum()) / played,
        "observations": watch.looks * args.num_envs, "commit": args.commit, "machine": machine(args.device),
        "python": platform.python_version(), "numpy": np.__version__, "gymnasium": gymnasium.__version__,
    }  # fmt: skip


def name_of(env_id: str, args: argparse.Namespace) -> str:
    """Return the file name of a row."""
    suffix = "-compiled" if args.compile else ""
    parts = (
        env_id.partition("/")[2],
        args.backend,
        args.device + suffix,
        f"{args.num_envs}x{args.steps}",
        f"seed{args.seed}",
    )
    return "-".join((*parts, args.commit)) + ".json"


def cells(row: dict[str, Any]) -> list[str]:
    """Format a row as cells of the table."""
    before, after = row["before"] or row["after"], row["after"]
    mib = {kind: f"{before[kind] / 2**20:.1f} → {after[kind] / 2**20:.1f}" for kind in ("rss", "gpu")}
    formatted = {
        "reward": f"{row['reward_least']:.3f} … {row['reward_most']:.3f}",
        "memory_mib": mib["rss"],
        "objects": f"{before['objects']:,} → {after['objects']:,}",
        "gpu_mib": mib["gpu"] if after["gpu"] else "",
        "faults": ", ".join(f"{fault}: {count:,}" for fault, count in row["faults"].items()) or "none",
        "steps_per_second": f"{row['steps'] / row['seconds']:,.0f}",
        "device": row["device"] + (", compiled" if row["compile"] else ""),
    }
    values = [formatted.get(name, row.get(name)) for name in COLUMNS]
    return [f"{value:,}" if isinstance(value, int) else str(value) for value in values]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows as a Markdown table."""
    lines = [[name.replace("_", " ") for name in COLUMNS], ["---"] * len(COLUMNS), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10**9, help="least number of steps of all environments together")
    parser.add_argument("--num-envs", type=int, default=4096, help="number of environments")
    parser.add_argument("--backend", choices=("numpy", "torch"), help="default: torch on cuda, otherwise numpy")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: only on cuda")
    parser.add_argument("--threads", type=int, default=1, help="torch threads on a CPU")
    parser.add_argument("--env-id", nargs="+", choices=ENVIRONMENTS, default=GAMES, metavar="ID", help="environments")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the rows and their table")
    args = parser.parse_args(argv)
    args.backend = args.backend or ("torch" if args.device == "cuda" else "numpy")
    args.compile = args.device == "cuda" if args.compile is None else args.compile
    if min(args.steps, args.num_envs, args.threads) < 1 or args.seed < 0:
        given = f"steps={args.steps}, num_envs={args.num_envs}, threads={args.threads}, seed={args.seed}"
        parser.error(f"{given}: expected at least 1, 1, 1 and 0")
    if args.backend == "numpy" and (args.device == "cuda" or args.compile):
        parser.error("backend='numpy': expected 'torch' with --device cuda or --compile")
    return args


def main(argv: Sequence[str]) -> int:
    """Play all games, print and store their rows, and return the exit status."""
    args, stopping = parse(argv), list[int]()
    args.commit = current_commit()  # now, because the checkout may change during the run
    if args.backend == "torch":
        import torch

        torch.set_num_threads(args.threads)

    def stop(number: int, _: Any) -> None:
        stopping.append(number)
        write_stderr("stopping after these calls; interrupt again to stop at once")

    rows = []
    with on_stop_signal(stop, once=True):
        for env_id in args.env_id:
            if stopping:
                break
            file = None if args.out is None else args.out / name_of(env_id, args)
            row = None if file is None else read_row(file)
            if row is None or (row["steps"] < args.steps and not row["faults"]):
                row = soak(env_id, args, stopping)
                if file is not None:
                    store(file, row)
            rows.append(row)
    print(table(rows))
    return EXIT_INTERRUPTED if stopping else int(any(row["faults"] for row in rows))


def read_row(file: Path) -> dict[str, Any] | None:
    """Return the row in a file, or None: the folder may hold files of other programs."""
    try:
        row = read_summary(file)
    except (FileNotFoundError, ValueError):
        return None
    return row if row.keys() >= {"before", "after", "faults"} else None


def store(file: Path, row: dict[str, Any]) -> None:
    """Write a row, and the table of all rows in its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(row, indent=1) + "\n")
    rows = list(filter(None, map(read_row, sorted(file.parent.glob("*.json")))))
    write_atomically(file.parent / "table.md", table(rows) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
