"""Kill a trainer without warning at many moments, let it go on each time, and compare with a run that nothing broke.

    python benchmarks/kill_trainer.py --kills 100 --out build/kills.json
    python benchmarks/kill_trainer.py --kills 20 -- --env-id noisy_envs/BoxWorldEntities-v0 --preset fast
    python benchmarks/kill_trainer.py --trainer supervised/knn_centroid.py --kills 20

Runs are short; when one ends the next begins, until there were as many kills (SIGKILL) as asked. A third of the kills
come at any moment from the start of the process to its first row, a third at any moment after some row of `metrics.csv`
and a third at once when some file that is not yet whole shows in the run's folder. What a kill met is read from what it
left. Each run must end with the rows of the unbroken one, but for times, and with its weights, optimizer and worlds bit
for bit; after each kill the last checkpoint must load. OUT gets the kills as JSON, and a table beside it as .md.

Processes are forked from one that has imported torch, and are otherwise started as by hand. Words after -- go to the
trainer. Not for environments that are not ours, which cannot be saved amid an episode. Linux only.
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
PATIENCE = 300.0  # seconds, after which a trainer that does nothing is an error
AIMS = ("start", "row", "write")
SHORT = {  # words for seconds of training
    "agents": "--num-envs 4 --num-steps 16 --minibatch-size 32 --update-epochs 1 --total-timesteps 2560 "
    "--checkpoint-interval 3 --eval-episodes 3 --no-capture-video",
    "supervised": "--num-sets 300 --num-vectors 8 --epochs 12 --batch-size 24 --pooling adapool --seeds 1 --folds 1 "
    "--jobs 1 --dropout 0.1",
}
STATE = {"agents": ("agent", "optimizer", "processes"), "supervised": ("network", "best", "optimizer")}
IMPORTED = ["torch", "torch._dynamo", "torch.utils.tensorboard", "matplotlib.pyplot", "tyro"]
IMPORTED += ["noisy_envs.training.gymnasium_envs", "noisy_envs.training.checkpoint"]


class Trainer(NamedTuple):
    """A script, and the words for a run of it in a folder."""

    script: Path
    words: tuple[str, ...]

    @property
    def kind(self) -> str:
        """Name the folder of its script, "agents" or "supervised"."""
        return self.script.parent.name

    def command(self, root: Path) -> list[str]:
        """Return the words that begin a run under `root`, or go on with the one that is there."""
        saved = checkpoint(root)
        if self.kind == "supervised":
            return [*self.words, "--out", str(root / "run"), "--data-dir", str(root)]
        return [*self.words, "--run-dir", str(root)] if saved is None else ["--resume", str(saved.parent)]


class Kill(NamedTuple):
    """One kill: in which run, how its moment was chosen, what it met, how many rows there were."""

    run: int
    aim: str
    phase: str
    rows: int


def checkpoint(root: Path) -> Path | None:
    """Return the checkpoint of the run under `root`, if it has one."""
    return next(root.rglob("checkpoint.pt"), None)


def unfinished(root: Path) -> set[Path]:
    """Return the files under `root` that are not yet whole."""
    return set(root.rglob("*.part"))


def sizes(root: Path) -> dict[Path, int]:
    """Return the sizes of all metrics under `root`."""
    return {path: path.stat().st_size for path in root.rglob("metrics.csv")}


def rows_of(root: Path) -> list[dict[str, str]]:
    """Return the rows of the run's metrics, without times; a last line that is cut is left out."""
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
    """Walk through nested containers, keys included."""
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
    """Tell whether two nested containers of tensors and numbers are the same to the bit."""
    pairs = list(zip(*map(list, map(leaves, (one, other))), strict=False))

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        return bool(a == b)

    return len(list(leaves(one))) == len(list(leaves(other))) and all(same(a, b) for a, b in pairs)


def play(script: Path, words: list[str], log: Path) -> None:
    """Run a script as Python does, what it prints going to a file."""
    with log.open("ab") as file:
        for handle in (1, 2):
            os.dup2(file.fileno(), handle)
    multiprocessing.set_start_method("fork", force=True)  # as in a process that was started by hand
    sys.argv = [str(script), *words]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def start(trainer: Trainer, root: Path) -> BaseProcess:
    """Start a process of a trainer, or let it go on."""
    context: Any = multiprocessing.get_context("forkserver")  # which Windows lacks
    context.set_forkserver_preload(IMPORTED)
    arguments = (trainer.script, trainer.command(root), root / "log.txt")
    process: BaseProcess = context.Process(target=play, args=arguments, daemon=True)
    process.start()
    return process


def give_up(process: BaseProcess, reason: str) -> NoReturn:
    """Kill a process that hangs, and raise TimeoutError."""
    process.kill()
    process.join()
    raise TimeoutError(reason)


def await_moment(process: BaseProcess, root: Path, aim: str, dice: random.Random, first_row: float) -> None:
    """Return at a moment of a kind, or when the process has ended."""
    begun, wanted, later = time.monotonic(), dice.randint(1, 4), dice.uniform(0, 0.3)
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
            if changes == wanted:
                break
        if time.monotonic() > begun + PATIENCE:
            give_up(process, f"nothing new in {root} for {PATIENCE:.0f} s")
        if aim == "row":
            time.sleep(0.002)
    if aim == "row":
        process.join(later)


def phase_of(root: Path, left: set[Path], before: dict[Path, int], length: int) -> str:
    """Tell what a kill met, by what it left."""
    names = {path.name.removeprefix(".").rsplit(".", 2)[0] for path in left}
    if names:
        return f"while writing {min(names)}"
    if any(not path.read_bytes().endswith(b"\n") for path in before.keys() | sizes(root).keys()):
        return "amid a line of metrics.csv"
    if checkpoint(root) is None:
        return "before the first checkpoint"
    if len(rows_of(root)) == length:
        return "after the last update"
    return "while starting again" if sizes(root) == before else "training"


def finish(process: BaseProcess, root: Path) -> None:
    """Wait for a process to end, and raise RuntimeError with its words if it failed, TimeoutError if it hangs."""
    process.join(PATIENCE)
    if process.exitcode is None:
        give_up(process, f"{root} has not ended after {PATIENCE:.0f} s")
    if process.exitcode:
        told = (root / "log.txt").read_text(encoding="utf-8").strip().splitlines()
        raise RuntimeError(f"{root}: exit status {process.exitcode}: {told[-1] if told else 'no word'}")


def unbroken(trainer: Trainer, root: Path) -> float:
    """Make the run that nothing breaks; returns after how many seconds it had its first row."""
    root.mkdir()
    begun, process = time.monotonic(), start(trainer, root)
    while not rows_of(root) and process.exitcode is None and time.monotonic() < begun + PATIENCE:
        time.sleep(0.01)
    first_row = time.monotonic() - begun
    finish(process, root)
    return first_row


def broken(trainer: Trainer, root: Path, most: int, run: int, dice: random.Random, model: Path) -> list[Kill]:
    """Make a run that is killed until it ends, or `most` times; returns the kills."""
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
    """Tell in what a run is equal to the unbroken one, and what it left that is not whole."""
    ours, theirs = (load_checkpoint(path) for path in (checkpoint(root), checkpoint(model)) if path is not None)
    return {
        "rows": len(rows_of(root)),
        "rows_equal": rows_of(root) == rows_of(model),
        **{f"{name}_equal": equal(ours[name], theirs[name]) for name in STATE[trainer.kind]},
        "left": sorted(path.name for path in unfinished(root)),
    }


def tabulate(found: dict[str, Any]) -> str:
    """Return the table: kills by what they met, and what came out."""
    met = collections.Counter(kill["phase"] for kill in found["kills"])
    ends = found["runs"]
    good = sum(all(value for name, value in end.items() if name.endswith("_equal")) for end in ends)
    lines = ["| the kill met | kills |", "|---|---|", *(f"| {name} | {count} |" for name, count in met.most_common())]
    lines += [f"| all | {len(found['kills'])} |", ""]
    left = sum(len(end["left"]) for end in ends)
    lines += [
        f"{good} of {len(ends)} runs of {ends[0]['rows']} rows equal the unbroken one; {left} files left unwhole."
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> None:
    """Kill, compare, and end with exit status 1 if a run differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", type=Path, default=ROOT / "agents" / "ppo_adapool.py")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--out", type=Path, help="JSON file")
    end = list(argv).index("--") if "--" in argv else len(argv)
    args, own = parser.parse_args(argv[:end]), list(argv[end + 1 :])
    script = args.trainer.resolve()
    if args.kills < 1 or not script.is_file() or script.parent.name not in SHORT:
        parser.error(f"kills={args.kills}, trainer={args.trainer}: must be from 1, and a file in agents or supervised")
    os.environ.setdefault("NOISY_ENVS_COMMIT", current_commit())  # asked for once instead of at each checkpoint
    trainer = Trainer(script, (*SHORT[script.parent.name].split(), *own))
    dice, begun = random.Random(args.seed), time.monotonic()
    kills: list[Kill] = []
    ends: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "unbroken"
        (model.parent / "first_row").write_text(str(unbroken(trainer, model)), encoding="utf-8")
        (model.parent / "first_row").rename(model / "first_row")
        while len(kills) < args.kills:
            root = Path(folder) / f"run-{len(ends) + 1}"
            kills += broken(trainer, root, args.kills - len(kills), len(ends) + 1, dice, model)
            ends.append(compare(trainer, model, root))
            print(f"run {len(ends)}, {len(kills)} kills, {time.monotonic() - begun:.0f} s: {ends[-1]}", flush=True)
    found = {
        "command": ["python", "benchmarks/kill_trainer.py", *argv],
        "versions": library_versions(),
        "seed": args.seed,
        "words": trainer.words,
        "seconds": time.monotonic() - begun,
        "kills": [kill._asdict() for kill in kills],
        "runs": ends,
    }
    print(tabulate(found))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_summary(args.out, found)
        write_atomically(args.out.with_suffix(".md"), tabulate(found))
    if not all(value for end in ends for name, value in end.items() if name.endswith("_equal")):
        raise SystemExit("a run differs from the unbroken one")


if __name__ == "__main__":
    main(sys.argv[1:])
