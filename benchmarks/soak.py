"""A billion steps of each game with random actions, on NumPy or torch, looking for what shows only late.

    python benchmarks/soak.py [--steps 1_000_000_000] [--num-envs 4096] [--backend torch] [--device cuda] [--out soak]

A step is one step of one world; a call that resets a world is none. In each step of each world it looks at:

* rewards: finite, within what the game can pay, and 0 in the call that resets;
* ends: truncated after exactly `max_steps` and never later, terminated where the game's rule says so and nowhere else.

In each 16th call (`EVERY`) of all worlds it looks at observations (finite, in their space) and shares of signal, and at
the end at the environments' own counters: number of the episode, steps of it, seed. Memory is measured after a tenth
of the steps and at the end: of the process, Python's objects in it, and tensors on a GPU. What was seen stays on the
device and is read after each 256 calls (`CALLS`). The exit status is 1 if anything was wrong.

With `--out` each game's row is written to that folder when it is through, beside a table of all rows that lie there,
and is kept: the same command again plays only what is missing. Ctrl-C ends it after the calls in progress, and keeps
the row of what was played.
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
CALLS = 256  # between two readings
EVERY = 16  # calls of which one has its observations looked at: odd episodes of 129 and 31 calls meet each step of them
MOST_GROWTH = 16 * 2**20  # bytes of the process from the first tenth on: an allocator's ups and downs stay below
COLUMNS = (
    "env_id", "backend", "device", "num_envs", "steps", "episodes", "truncated", "terminated", "solved", "reward",
    "observations", "memory_mib", "objects", "gpu_mib", "faults", "steps_per_second", "commit",
)  # fmt: skip


def reward_range(game: Any) -> tuple[float, float]:
    """Return the least and the most that the first agent can be paid in a step."""
    if game.name == "box_world":
        return DISTRACTOR_REWARD, GEM_REWARD
    if game.name == "simple_tag":
        payers = game.num_predators if game.reward_sharing == "shared" else 1
        return 0.0, CATCH * payers * game.num_prey
    _, high = game.observation_bounds
    farthest = math.hypot(high[0, 0], high[0, 1]) * game.observation_scale
    return -game.reward_scale * math.sqrt(farthest), 0.0


def rule_of_end(game: Any, reward: Array) -> tuple[Array, Array]:
    """Tell by the rewards (B,) alone which worlds are over, and which of these are solved, (B,) each."""
    solved = reward == GEM_REWARD
    if not game.terminates:
        return solved & False, solved & False
    return solved | (reward == DISTRACTOR_REWARD), solved


class Watch:
    """What was seen of `B` worlds so far, in arrays (B,) on their device, and how often it was wrong."""

    def __init__(self, envs: Any) -> None:
        """Begin to watch environments that were just reset."""
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
        """Count a fault where it is, bool (B,)."""
        self.faults[fault] = self.faults.get(fault, 0) + where

    def see(self, reward: Array, terminated: Array, truncated: Array) -> None:
        """Look at what a step gave of each world, (B,) each."""
        xp, fresh = namespace(reward), self.ended
        self.calls += 1
        self.age = (self.age + 1) * ~fresh
        over, solved = rule_of_end(self.game, reward)
        self.count("a reset paid", fresh & (reward != 0))
        self.count("a reset ended", fresh & (terminated | truncated))
        self.count("truncated early", truncated & (self.age != self.limit))
        self.count("not ended in time", ~terminated & ~truncated & (self.age >= self.limit))
        self.count("terminated against the rules", terminated != over)
        self.count("terminated and truncated", terminated & truncated)
        self.count("reward out of range", ~((reward >= self.low) & (reward <= self.high)))  # NaN too
        self.least, self.most = xp.minimum(self.least, reward), xp.maximum(self.most, reward)
        self.paid, self.resets = self.paid + reward, self.resets + fresh
        self.truncated, self.terminated = self.truncated + truncated, self.terminated + terminated
        self.solved, self.ended = self.solved + solved, terminated | truncated

    def look(self, tokens: Array, snr: Array) -> None:
        """Look at observations (B, ...) and shares of signal (B,)."""
        low, high = self.bounds
        self.looks += 1
        inside = ((tokens >= low) & (tokens <= high)).reshape(len(tokens), -1)  # NaN is not
        self.count("observation out of its space", ~inside.all(axis=1))
        self.count("no share of signal", ~((snr > 0) & (snr <= 1)))

    def compare(self, envs: Any, seed: int) -> None:
        """Look at the environments' own counters."""
        worlds = envs.batch_state
        first = namespace(worlds.seed).arange(seed, seed + len(worlds.seed), device=worlds.seed.device)
        self.count("number of the episode", worlds.number != self.resets)
        self.count("steps of the episode", worlds.clock != self.age)
        self.count("seed", worlds.seed != first)

    @property
    def played(self) -> int:
        """Steps so far; waits for a GPU."""
        return self.calls * len(self.age) - int(self.resets.sum())

    def found(self) -> dict[str, int]:
        """Return how often each fault was seen, of those that were."""
        counts = {fault: int(where.sum()) for fault, where in self.faults.items()}
        return {fault: count for fault, count in counts.items() if count}


def drawer(envs: Any, seed: int) -> Callable[[], Array]:
    """Return what draws random actions of all worlds, on their device."""
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
    """Return the bytes of the process, Python's memory blocks in it, and the bytes of tensors on a GPU."""
    gc.collect()
    gpu = 0
    if device != "cpu":
        import torch

        gpu = torch.cuda.memory_allocated()
    return {"rss": resident(), "objects": sys.getallocatedblocks(), "gpu": gpu}


def resident() -> int:
    """Return the bytes of the process in memory; on macOS the most so far, 0 on Windows."""
    if sys.platform == "linux":
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def soak(env_id: str, args: argparse.Namespace, stopping: list[int]) -> dict[str, Any]:
    """Play a game until its steps are played or `stopping` is not empty, and return its row."""
    place = {} if args.backend == "numpy" else {"backend": "torch", "device": args.device, "compile": args.compile}
    envs: Any = gymnasium.make_vec(env_id, args.num_envs, copy=False, **place)
    envs.reset(seed=args.seed)
    watch, draw = Watch(envs), drawer(envs, args.seed)
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
            if watch.found() or stopping:  # asked here: a row is of some steps
                break
    seconds = time.perf_counter() - start
    after = memory(args.device)
    watch.compare(envs, args.seed)
    faults = watch.found() | growth(before or after, after)
    return row_of(env_id, args, watch, seconds) | {"before": before, "after": after, "faults": faults}


def growth(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Return what memory has grown by more than it may, by kind."""
    most = {"rss": MOST_GROWTH, "objects": CALLS, "gpu": 0}  # fewer objects than one for each thousand calls
    return {f"growth of {kind}": after[kind] - before[kind] for kind in most if after[kind] - before[kind] > most[kind]}


def row_of(env_id: str, args: argparse.Namespace, watch: Watch, seconds: float) -> dict[str, Any]:
    """Return what was played and seen."""
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
    """Return the name of a row's file."""
    how = "-compiled" if args.compile else ""
    words = (
        env_id.partition("/")[2],
        args.backend,
        args.device + how,
        f"{args.num_envs}x{args.steps}",
        f"seed{args.seed}",
    )
    return "-".join((*words, args.commit)) + ".json"


def cells(row: dict[str, Any]) -> list[str]:
    """Write a row as cells of the table."""
    before, after = row["before"] or row["after"], row["after"]
    mib = {kind: f"{before[kind] / 2**20:.1f} → {after[kind] / 2**20:.1f}" for kind in ("rss", "gpu")}
    told = {
        "reward": f"{row['reward_least']:.3f} … {row['reward_most']:.3f}",
        "memory_mib": mib["rss"],
        "objects": f"{before['objects']:,} → {after['objects']:,}",
        "gpu_mib": mib["gpu"] if after["gpu"] else "",
        "faults": ", ".join(f"{fault}: {count:,}" for fault, count in row["faults"].items()) or "none",
        "steps_per_second": f"{row['steps'] / row['seconds']:,.0f}",
        "device": row["device"] + (", compiled" if row["compile"] else ""),
    }
    values = [told.get(name, row.get(name)) for name in COLUMNS]
    return [f"{value:,}" if isinstance(value, int) else str(value) for value in values]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    lines = [[name.replace("_", " ") for name in COLUMNS], ["---"] * len(COLUMNS), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10**9, help="of all worlds together, at least")
    parser.add_argument("--num-envs", type=int, default=4096, help="worlds")
    parser.add_argument("--backend", choices=("numpy", "torch"), help="by default torch on cuda, else numpy")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="by default on cuda")
    parser.add_argument("--threads", type=int, default=1, help="of torch on a CPU")
    parser.add_argument("--env-id", nargs="+", choices=ENVIRONMENTS, default=GAMES, metavar="ID", help="what is played")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for rows and their table")
    args = parser.parse_args(argv)
    args.backend = args.backend or ("torch" if args.device == "cuda" else "numpy")
    args.compile = args.device == "cuda" if args.compile is None else args.compile
    if min(args.steps, args.num_envs, args.threads) < 1 or args.seed < 0:
        parser.error("--steps, --num-envs and --threads must be at least 1, --seed at least 0")
    if args.backend == "numpy" and (args.device == "cuda" or args.compile):
        parser.error("--device cuda and --compile need --backend torch")
    return args


def main(argv: Sequence[str]) -> int:
    """Play game after game, and print and keep their rows; return the exit status."""
    args, stopping = parse(argv), list[int]()
    args.commit = current_commit()  # now: the checkout may move on while this plays
    if args.backend == "torch":
        import torch

        torch.set_num_threads(args.threads)

    def stop(number: int, _: Any) -> None:
        stopping.append(number)
        write_stderr("stopping after these calls; once more: at once")

    rows = []
    with on_stop_signal(stop, once=True):
        for env_id in args.env_id:
            if stopping:
                break
            file = None if args.out is None else args.out / name_of(env_id, args)
            row = None if file is None else row_in(file)
            if row is None or (row["steps"] < args.steps and not row["faults"]):
                row = soak(env_id, args, stopping)
                if file is not None:
                    keep(file, row)
            rows.append(row)
    print(table(rows))
    return EXIT_INTERRUPTED if stopping else int(any(row["faults"] for row in rows))


def row_in(file: Path) -> dict[str, Any] | None:
    """Return the row in a file, or None where there is none: the folder may hold what others wrote."""
    try:
        found = read_summary(file)
    except (FileNotFoundError, ValueError):
        return None
    return found if found.keys() >= {"before", "after", "faults"} else None


def keep(file: Path, row: dict[str, Any]) -> None:
    """Write a row, and beside it the table of all that lie there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(row, indent=1) + "\n")
    found = list(filter(None, map(row_in, sorted(file.parent.glob("*.json")))))
    write_atomically(file.parent / "table.md", table(found) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
