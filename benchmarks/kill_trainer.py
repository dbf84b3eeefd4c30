"""Kill a trainer at random moments, resume it each time, and compare the result with an uninterrupted run.

    python benchmarks/kill_trainer.py --kills 100 --out build/kills.json
    python benchmarks/kill_trainer.py --kills 20 -- --env-id noisy_envs/BoxWorldEntities-v0 --preset fast
    python benchmarks/kill_trainer.py --trainer supervised/knn_centroid.py --kills 20

Short runs follow each other until the requested number of kills (SIGKILL) is reached. A third of the kills come between
the start of the process and its first row, a third some time after a row of `metrics.csv`, and a third as soon as a
partly written file appears in the run's folder. The files left behind show what a kill interrupted. Each run must end
with the rows of the uninterrupted run, except for times, and with equal weights, optimizer and environments, bit for
bit. After each kill the last checkpoint must load. OUT stores the kills as JSON; a table is written to the .md file.

Processes are forked from one that has imported torch. Arguments after -- go to the trainer. Other Gymnasium
environments are not supported, because their state cannot be saved during an episode. Linux only.
"""

from __future__ import annotations

import argparse
import collections
import csv
import multiprocessing
import os
import random
import runpy
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from noisy_envs.training.checkpoint import load_checkpoint, write_summary
from noisy_envs.training.files import write_atomically
from noisy_envs.training.versions import current_commit, library_versions

ROOT = Path(__file__).parents[1]
PATIENCE = 300.0  # seconds without progress after which a trainer counts as hung
AIMS = ("start", "row", "write")
SHORT = {  # arguments for a training run of a few seconds
    "agents": "--num-envs 4 --num-steps 16 --minibatch-size 32 --update-epochs 1 --total-timesteps 2560 "
    "--checkpoint-interval 3 --eval-episodes 3 --no-capture-video",
    "supervised": "--num-sets 300 --num-vectors 8 --epochs 12 --batch-size 24 --pooling adapool --seeds 1 --folds 1 "
    "--jobs 1 --dropout 0.1",
}
STATE = {"agents": ("agent", "optimizer", "processes"), "supervised": ("network", "best", "optimizer")}
IMPORTED = ["torch", "torch._dynamo", "torch.utils.tensorboard", "matplotlib.pyplot", "tyro"]
IMPORTED += ["noisy_envs.training.gymnasium_envs", "noisy_envs.training.checkpoint"]


class Trainer(NamedTuple):
    """A training script and its arguments."""

    script: Path
    arguments: tuple[str, ...]

    @property
    def kind(self) -> str:
        """Return the name of the script's folder, "agents" or "supervised"."""
        return self.script.parent.name

    def command(self, root: Path) -> list[str]:
        """Return the arguments that start a run under `root`, or resume the existing one."""
        saved = checkpoint(root)
        if self.kind == "supervised":
            return [*self.arguments, "--out", str(root / "run"), "--data-dir", str(root)]
        return [*self.arguments, "--run-dir", str(root)] if saved is None else ["--resume", str(saved.parent)]


class Kill(NamedTuple):
    """One kill: the run, how its moment was chosen, what it interrupted, and the number of rows."""

    run: int
    aim: str
    phase: str
    rows: int


def checkpoint(root: Path) -> Path | None:
    """Return the checkpoint of the run under `root`, or None."""
    return next(root.rglob("checkpoint.pt"), None)


def unfinished(root: Path) -> set[Path]:
    """Return the partly written files under `root`."""
    return set(root.rglob("*.part"))


def sizes(root: Path) -> dict[Path, int]:
    """Return the sizes of all metrics files under `root`."""
    return {path: path.stat().st_size for path in root.rglob("metrics.csv")}


def rows_of(root: Path) -> list[dict[str, str]]:
    """Return the rows of the run's metrics, without times and without an incomplete last line."""
    saved = checkpoint(root)
    path = saved.with_name("metrics.csv") if saved is not None else None
    if path is None or not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
    return [
        {name: value for name, value in row.items() if "SPS" not in name and "seconds" not in name}
        for row in csv.DictReader(lines)
    ]


def leaves(content: Any) -> Iterator[Any]:
    """Yield the leaves of nested containers, and their keys."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield key
            yield from leaves(value)
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from leaves(value)
    else:
        yield content


def equal(one: Any, other: Any) -> bool:
    """Return whether two nested containers of tensors and numbers are equal bit for bit."""
    pairs = list(zip(*map(list, map(leaves, (one, other))), strict=False))

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        return bool(a == b)

    return len(list(leaves(one))) == len(list(leaves(other))) and all(same(a, b) for a, b in pairs)


def run_script(script: Path, arguments: list[str], log: Path) -> None:
    """Run a script as a program whose output goes to a file."""
    with log.open("ab") as file:
        for handle in (1, 2):
            os.dup2(file.fileno(), handle)
    multiprocessing.set_start_method("fork", force=True)  # as in a process started from a shell
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def start(trainer: Trainer, root: Path) -> BaseProcess:
    """Start a process that begins or resumes a run."""
    context: Any = multiprocessing.get_context("forkserver")  # not available on Windows
    context.set_forkserver_preload(IMPORTED)
    arguments = (trainer.script, trainer.command(root), root / "log.txt")
    process: BaseProcess = context.Process(target=run_script, args=arguments, daemon=True)
    process.start()
    return process


def give_up(process: BaseProcess, reason: str) -> NoReturn:
    """Kill a hung process and raise TimeoutError."""
    process.kill()
    process.join()
    raise TimeoutError(reason)


def await_moment(process: BaseProcess, root: Path, aim: str, dice: random.Random, first_row: float) -> None:
    """Wait for a random moment of the kind `aim`, or for the end of the process."""
    start_time, target, delay = time.monotonic(), dice.randint(1, 4), dice.uniform(0, 0.3)
    if aim == "start":
        process.join(dice.uniform(0, first_row))
        return
    look = sizes if aim == "row" else unfinished
    seen, changes = look(root), 0
    while process.exitcode is None:
        now = look(root)
        if now != seen:
            changes += aim == "row" or bool(now - seen)  # type: ignore[operator]
            seen = now
            if changes == target:
                break
        if time.monotonic() > start_time + PATIENCE:
            give_up(process, f"{root}: expected progress within {PATIENCE:.0f} s")
        if aim == "row":
            time.sleep(0.002)
    if aim == "row":
        process.join(delay)


def phase_of(root: Path, left: set[Path], before: dict[Path, int], length: int) -> str:
    """Return what a kill interrupted, judging by the files left behind."""
    names = {path.name.removeprefix(".").rsplit(".", 2)[0] for path in left}
    if names:
        return f"while writing {min(names)}"
    if any(not path.read_bytes().endswith(b"\n") for path in before.keys() | sizes(root).keys()):
        return "in the middle of a line of metrics.csv"
    if checkpoint(root) is None:
        return "before the first checkpoint"
    if len(rows_of(root)) == length:
        return "after the last update"
    return "while resuming" if sizes(root) == before else "training"


def finish(process: BaseProcess, root: Path) -> None:
    """Wait for a process to end; raise RuntimeError with its last line if it failed, TimeoutError if it hangs."""
    process.join(PATIENCE)
    if process.exitcode is None:
        give_up(process, f"{root}: expected the process to end within {PATIENCE:.0f} s")
    if process.exitcode:
        lines = (root / "log.txt").read_text(encoding="utf-8").strip().splitlines()
        raise RuntimeError(f"{root}: exit status {process.exitcode}: {lines[-1] if lines else 'no output'}")


def uninterrupted(trainer: Trainer, root: Path) -> float:
    """Train without interruption and return the seconds until the first row."""
    root.mkdir()
    start_time, process = time.monotonic(), start(trainer, root)
    while not rows_of(root) and process.exitcode is None and time.monotonic() < start_time + PATIENCE:
        time.sleep(0.01)
    first_row = time.monotonic() - start_time
    finish(process, root)
    return first_row


def interrupted(trainer: Trainer, root: Path, most: int, run: int, dice: random.Random, model: Path) -> list[Kill]:
    """Kill and resume a run until it ends, at most `most` times, and return the kills."""
    root.mkdir()
    first_row, length = float((model / "first_row").read_text(encoding="utf-8")), len(rows_of(model))
    kills: list[Kill] = []
    while len(kills) < most:
        aim, before, left = dice.choice(AIMS), sizes(root), unfinished(root)
        process = start(trainer, root)
        await_moment(process, root, aim, dice, first_row)
        process.kill()
        process.join()
        if process.exitcode != -9:
            finish(process, root)
            break
        if (saved := checkpoint(root)) is not None:
            load_checkpoint(saved)
        phase = phase_of(root, unfinished(root) - left, before, length)
        kills.append(Kill(run, aim, phase, len(rows_of(root))))
    else:
        finish(start(trainer, root), root)
    return kills


def compare(trainer: Trainer, model: Path, root: Path) -> dict[str, Any]:
    """Compare a run with the uninterrupted one, and list its partly written files."""
    ours, theirs = (load_checkpoint(path) for path in (checkpoint(root), checkpoint(model)) if path is not None)
    return {
        "rows": len(rows_of(root)),
        "rows_equal": rows_of(root) == rows_of(model),
        **{f"{name}_equal": equal(ours[name], theirs[name]) for name in STATE[trainer.kind]},
        "left": sorted(path.name for path in unfinished(root)),
    }


def tabulate(result: dict[str, Any]) -> str:
    """Format the number of kills by what they interrupted, and the outcome, in Markdown."""
    phases = collections.Counter(kill["phase"] for kill in result["kills"])
    ends = result["runs"]
    good = sum(all(value for name, value in end.items() if name.endswith("_equal")) for end in ends)
    lines = ["| the kill interrupted | kills |", "|---|---|"]
    lines += [f"| {name} | {count} |" for name, count in phases.most_common()]
    lines += [f"| all | {len(result['kills'])} |", ""]
    left = sum(len(end["left"]) for end in ends)
    equal_runs = f"{good} of {len(ends)} runs of {ends[0]['rows']} rows equal the uninterrupted one"
    lines += [f"{equal_runs}; {left} partly written files."]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> None:
    """Kill and compare runs; exit with status 1 if a run differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", type=Path, default=ROOT / "agents" / "ppo_adapool.py")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1, help="seed of the moments")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    end = list(argv).index("--") if "--" in argv else len(argv)
    args, trainer_args = parser.parse_args(argv[:end]), list(argv[end + 1 :])
    script = args.trainer.resolve()
    if args.kills < 1 or not script.is_file() or script.parent.name not in SHORT:
        parser.error(f"kills={args.kills}, trainer={args.trainer}: expected kills >= 1, a file in agents or supervised")
    os.environ.setdefault("NOISY_ENVS_COMMIT", current_commit())  # looked up once instead of at each checkpoint
    trainer = Trainer(script, (*SHORT[script.parent.name].split(), *trainer_args))
    dice, start_time = random.Random(args.seed), time.monotonic()
    kills: list[Kill] = []
    ends: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "uninterrupted"
        (model.parent / "first_row").write_text(str(uninterrupted(trainer, model)), encoding="utf-8")
        (model.parent / "first_row").rename(model / "first_row")
        while len(kills) < args.kills:
            root = Path(folder) / f"run-{len(ends) + 1}"
            kills += interrupted(trainer, root, args.kills - len(kills), len(ends) + 1, dice, model)
            ends.append(compare(trainer, model, root))
            print(f"run {len(ends)}, {len(kills)} kills, {time.monotonic() - start_time:.0f} s: {ends[-1]}", flush=True)
    result = {
        "command": ["python", "benchmarks/kill_trainer.py", *argv],
        "versions": library_versions(),
        "seed": args.seed,
        "arguments": trainer.arguments,
        "seconds": time.monotonic() - start_time,
        "kills": [kill._asdict() for kill in kills],
        "runs": ends,
    }
    print(tabulate(result))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_summary(args.out, result)
        write_atomically(args.out.with_suffix(".md"), tabulate(result))
    if not all(value for end in ends for name, value in end.items() if name.endswith("_equal")):
        raise SystemExit("error: a run differs from the uninterrupted one")


if __name__ == "__main__":
    main(sys.argv[1:])
