"""Keeping what a training run makes: its folder, metrics, checkpoints, pictures. Nothing here learns.

Agents import this alone, so that their files hold what teaches about learning; what other files need as well, it takes
from `files` and `pictures`. No file is ever half written, and no run writes into the folder of another.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import hashlib
import io
import json
import os
import platform
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from noisy_envs.files import (  # noqa: F401  agents import this module alone
    check_paths,
    lock,
    naming,
    new_folder,
    write_atomically,
)
from noisy_envs.pictures import (  # noqa: F401  too
    check_video_path,
    plot_curve,
    plot_matrix,
    plot_scores,
    write_gif,
    write_video,
)


def environment_seed(seed: int, purpose: str) -> int:
    """Hash a run's seed and a purpose ("train", "evaluate") to a seed of environments.

    World i takes this seed + i: runs seeded 1, 2, 3 would share worlds if they used their seeds as they are.
    """
    digest = hashlib.blake2b(f"{seed} {purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def use_deterministic(on: bool) -> None:
    """Let torch use only kernels that give the same bits each time, or any again. Call it before a GPU is used.

    Sets the environment's CUBLAS_WORKSPACE_CONFIG, which cuBLAS reads when it starts, unless it is set.
    """
    import torch

    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(on)


@functools.cache
def commit() -> str:
    """Return the commit of the code in use, marked "+" if files differ from it, or "unknown" outside its checkout.

    It stays what it was when first asked for, as the code that a process has loaded does. The variable
    NOISY_ENVS_COMMIT tells it where code runs without its history, in a container say. Why it is unknown is told once,
    in a line on standard error.
    """
    told = os.environ.get("NOISY_ENVS_COMMIT")
    if told:
        return told
    file = Path(__file__)

    def git(*words: str) -> str:
        options: dict[str, Any] = {"cwd": file.parent, "env": {**os.environ, "LC_ALL": "C"}}  # its words in English
        done = subprocess.run(
            ["git", *words], capture_output=True, check=True, encoding="utf-8", errors="replace", **options
        )
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)  # installed, it may lie in a repository of something else
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError) as error:
        why = " ".join(str(getattr(error, "stderr", error)).split())
        print(f"the commit is unknown: {why}; the variable NOISY_ENVS_COMMIT can tell it", file=sys.stderr)
        return "unknown"


def versions() -> dict[str, str]:
    """Name what a result depends on: commit, library versions, machine."""
    import gymnasium
    import torch

    import noisy_envs

    return {
        "commit": commit(),
        "noisy_envs": noisy_envs.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": str(torch.__version__),
        "gymnasium": gymnasium.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} torch threads",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


class OtherColumns(ValueError):
    """A `metrics.csv` holds other columns than are to be written."""


class Metrics:
    """Writes scalars to `metrics.csv`, to TensorBoard and to a tracker; a resumed run continues all of them.

    Args:
        folder: of the run.
        names: the columns, beside `global_step`.
        resume_at: drop rows beyond this step, which a checkpoint does not know.
        tracker: to which rows are sent as well; whoever started it closes it.

    Raises:
        ValueError: the `metrics.csv` to continue is damaged, or `OtherColumns`.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], resume_at: int | None = None, tracker: Tracker | None = None
    ) -> None:
        """Open all; see the class."""
        from torch.utils.tensorboard import SummaryWriter

        self.path, self.names = folder / "metrics.csv", ("global_step", *names)
        self.rows: list[dict[str, float]] = []
        if resume_at is not None and self.path.exists():
            self.rows = [row for row in read_metrics(self.path) if row["global_step"] <= resume_at]
        if self.rows:
            self._check(self.rows[0])
        write_atomically(self.path, self._text(self.rows, header=True))
        self._board = SummaryWriter(str(folder), purge_step=None if resume_at is None else resume_at + 1)
        self._tracker = tracker

    def add(self, step: int, values: dict[str, float]) -> None:
        """Record one value for each name at a step."""
        row = {"global_step": step, **values}
        self._check(row)
        self.rows.append(row)
        with naming(self.path), self.path.open("a", newline="", encoding="utf-8") as file:
            file.write(self._text([row], header=False))
        for name, value in values.items():
            self._board.add_scalar(name, value, step)
        if self._tracker is not None:
            self._tracker.log(step, values)

    def note(self, name: str, content: dict[str, Any]) -> None:
        """Show settings in TensorBoard, as a table."""
        rows = "\n".join(f"|{key}|{value}|" for key, value in content.items())
        self._board.add_text(name, f"|name|value|\n|-|-|\n{rows}")

    def close(self) -> None:
        """Flush and close TensorBoard's file."""
        self._board.close()

    def _check(self, row: dict[str, float]) -> None:
        if row.keys() != set(self.names):
            differing = ", ".join(sorted(row.keys() ^ set(self.names)))
            raise OtherColumns(
                f"{self.path} must have the same columns throughout, these come or go: {differing}; "
                "a run goes on by the version of the program that began it"
            )

    def _text(self, rows: list[dict[str, float]], header: bool) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.names, lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read a `metrics.csv`; the last line is left out if a kill cut it short.

    Raises:
        ValueError: naming another line that does not hold a number for each column.
    """
    whole = path.read_bytes().rpartition(b"\n")[0]  # a line without its end may hold half of a number
    header, *lines = whole.decode(errors="replace").split("\n")
    names, rows = next(csv.reader([header])), []
    for number, line in enumerate(lines, 2):
        try:
            step, *values = map(float, next(csv.reader([line])))
            rows.append(dict(zip(names, [int(step), *values], strict=True)))
        except (ValueError, csv.Error):
            if number <= len(lines):
                raise ValueError(f"{path}, line {number}: must be {len(names)} numbers, got {line!r}") from None
    return rows


def import_wandb() -> Any:
    """Return the module of Weights & Biases.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ValueError(f"tracking needs Weights & Biases ({error}): pip install wandb") from None
    if not hasattr(wandb, "init"):  # a folder `wandb`, as runs leave it, passes for a package
        raise ValueError("tracking needs Weights & Biases (there is but a folder of its name): pip install wandb")
    return wandb


class Tracker:
    """Sends a run's scalars to Weights & Biases; `start_tracking` makes it."""

    def __init__(self, run: Any) -> None:
        """Take a run that `wandb.init` started."""
        self._run = run

    def log(self, step: int, values: dict[str, float]) -> None:
        """Send one value for each name at a step.

        What Weights & Biases has seen is not sent again: a resumed run repeats the steps that no checkpoint knew.
        """
        if step >= self._run.starting_step:
            self._run.log(values, step=step)

    def summarize(self, values: dict[str, Any]) -> None:
        """Show results of the whole run, such as its evaluation."""
        self._run.summary.update(_plain(values))

    def close(self) -> None:
        """Send what is left, and end."""
        self._run.finish()


def start_tracking(project: str, name: str, config: dict[str, Any], folder: Path, resume: bool) -> Tracker:
    """Start to track a run on Weights & Biases, or go on with what was tracked before.

    Args:
        project: where it is shown.
        name: how it is called there.
        config: settings to show.
        folder: of the run, which keeps its id in `wandb_id`.
        resume: continue the one of this id, if there is one.

    Raises:
        ValueError: Weights & Biases is not installed, or does not start, say because nobody signed in.
    """
    wandb = import_wandb()
    known = folder / "wandb_id"
    if not (resume and known.exists()):
        write_atomically(known, secrets.token_hex(4) + "\n")
    try:
        run = wandb.init(
            project=project,
            name=name,
            config=_plain(config),
            dir=folder,
            id=known.read_text(encoding="utf-8").strip(),
            resume="allow" if resume else None,
        )
    except wandb.Error as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"Weights & Biases did not start: {reason}; WANDB_MODE=offline needs no account") from None
    return Tracker(run)


def checkpoint_path(given: Path) -> Path:
    """Return the checkpoint of a run's folder, or of the only run in a folder, or the one that is given itself.

    Raises:
        ValueError: several runs are in the folder.
    """
    if given.suffix and not given.is_dir():
        return given
    own = given / "checkpoint.pt"
    found = [own] if own.exists() else sorted(given.glob("*/checkpoint.pt"))
    if len(found) > 1:
        raise ValueError(f"{given} holds several runs, name one of them: {', '.join(x.parent.name for x in found)}")
    return found[0] if found else own


def only_runs(given: Sequence[Path]) -> tuple[Path, ...]:
    """Return what of `runs/*` may be evaluated: folders that hold no run are passed over, and named.

    Where there is nothing else, all is returned as it is given.
    """
    empty = [path for path in given if path.is_dir() and not checkpoint_path(path).exists()]
    found = tuple(path for path in given if path not in empty)
    if not found:
        return tuple(given)
    if empty:
        print(f"passed over, since they hold no run: {', '.join(map(str, empty))}", file=sys.stderr)
    return found


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Save tensors, numbers and texts, atomically."""
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, buffer.getvalue())


def to_tuples(tensors: Any) -> Any:
    """Turn named tuples of tensors into plain ones of copies, which a checkpoint may hold."""
    return tuple(map(to_tuples, tensors)) if isinstance(tensors, tuple) else tensors.clone()


def from_tuples(like: Any, saved: Any) -> Any:
    """Turn plain tuples of tensors back into the named ones of `like`, on its device."""
    if not isinstance(like, tuple):
        return saved.to(like.device)
    return type(like)(*map(from_tuples, like, saved))


@contextlib.contextmanager
def taking_up(path: Path) -> Iterator[None]:
    """Let a file that lacks parts, or holds strange ones, end as ValueError that names it."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        if str(path) in str(error):  # which tells already what is wrong
            raise
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{path} is not what this program wrote ({type(error).__name__}: {reason}); take another, or begin anew"
        ) from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint onto the CPU, without running code from it.

    Raises:
        FileNotFoundError, ValueError: naming the path.
    """
    import torch

    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        with zipfile.ZipFile(path) as archive:  # torch compresses nothing, and a small file could fill the memory
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it is compressed")
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen types for a damaged file
        raise ValueError(
            f"{path} is no checkpoint of an agent, or damaged ({type(error).__name__}); take another, or begin anew"
        ) from error
    return content


def _plain(value: Any) -> Any:
    """Replace what JSON lacks, in containers too: NaN and infinity become None, paths become texts."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def write_summary(path: Path, content: dict[str, Any]) -> None:
    """Write a summary as JSON; what JSON lacks, NaN and infinity, becomes null."""
    write_atomically(path, json.dumps(_plain(content), indent=2, default=str) + "\n")


def read_summary(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object, as `write_summary` writes it.

    Raises:
        ValueError: it is damaged, or something else, naming it.
        OSError: it cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of bytes that are no text, too
        raise ValueError(f"{path} is damaged ({error}): delete it, and it is written again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged (it holds no object): delete it, and it is written again")
    return found


DRAWN = 2**22  # numbers that a bootstrap draws at a time, 32 MiB


def bootstrap_interval(
    values: np.ndarray, seed: int, level: float = 0.95, resamples: int = 2000
) -> tuple[float, float]:
    """Return the bootstrapped confidence interval of the mean of values (n,).

    A single value tells nothing of its spread: both ends are NaN.

    Raises:
        ValueError: there is no value, or one that is not finite.
    """
    if np.ndim(values) != 1 or not len(values) or not np.isfinite(values).all():
        bad = int(np.size(values) - np.isfinite(values).sum())
        raise ValueError(f"values must be (n,), n from 1, and finite, got {np.shape(values)}, {bad} of them not finite")
    if len(values) == 1:
        return np.nan, np.nan
    generator, rows = np.random.default_rng(seed), max(1, DRAWN // len(values))
    means = [
        values[generator.integers(0, len(values), (min(rows, resamples - done), len(values)))].mean(axis=1)
        for done in range(0, resamples, rows)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def explain(error: Exception) -> str:
    """Tell an error that ends a program, and what to do where the system caused it: a full disk, say."""
    from_system = isinstance(error, OSError) and error.errno is not None  # not a word of ours
    return f"{error}; once that is mended, go on with the same command" if from_system else str(error)


BEYOND = re.compile(r"out of memory|tried to allocate|size calculation overflowed|alloc_failed", re.IGNORECASE)


@contextlib.contextmanager
def within_memory() -> Iterator[None]:
    """Let a request beyond the memory, of NumPy or of torch on any device, end the program with one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not BEYOND.search(str(error)):
            raise
        piece = re.search(r"allocate (\d[\d.]* ?\w+)", str(error))
        raise SystemExit(
            f"error: out of memory{f', of which {piece[1]} more were asked for' if piece else ''}: ask for fewer worlds, "
            "steps, tokens, episodes or samples at once, or for a smaller network; what is saved can be gone on with"
        ) from None


def check_memory(needs: Mapping[str, int], device: str) -> None:
    """Raise ValueError if one of `needs` alone, numbers of 4 bytes by the settings that ask for them, is too much.

    What fills the memory bit by bit meets no error: on Linux the system kills the process.
    """
    import torch

    if torch.device(device).type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    elif hasattr(os, "sysconf"):  # not on Windows
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        return
    for settings, numbers in needs.items():
        if 4 * numbers > memory:
            needed, there = (f"{size / 2**30:.3g} GiB" for size in (4 * numbers, memory))
            raise ValueError(f"{settings}: must fit into the memory of {device}, {there}, and needs at least {needed}")


def check_flags(kind: type, argv: Sequence[str]) -> None:
    """Raise ValueError if a word gives a value to a flag: to a setting of the dataclass `kind` that is true or false."""
    flags = [field.name.replace("_", "-") for field in dataclasses.fields(kind) if isinstance(field.default, bool)]
    for word, following in zip(argv, [*argv[1:], "--"], strict=True):
        given, equals, value = word.partition("=")
        name = given.replace("_", "-").removeprefix("--").removeprefix("no-")
        if given.startswith("--") and name in flags and (equals or not following.startswith("-")):
            told = value if equals else following
            raise ValueError(f"{given} {told!r}: a flag takes no value, must be --{name} or --no-{name}")


STOPPED = 130  # exit status of what was told to stop: the shell's for Ctrl-C


@contextlib.contextmanager
def quiet_pipe() -> Iterator[None]:
    """End silently when what reads the output, `head` say, has read enough.

    A letter that the output's encoding lacks becomes "?": on Windows a pipe or file knows neither − nor ≤. What goes
    to an output that was closed, by `>&-` say, is lost.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(nowhere, "w", encoding="utf-8", closefd=False))  # open to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
        raise SystemExit(141) from None  # as the shell has it for SIGPIPE


def stop_signals() -> list[signal.Signals]:
    """Return what asks a process to stop: Ctrl-C, SIGTERM, SIGUSR1, and a terminal that closes.

    Slurm sends SIGUSR1 before a time limit, if told so. The last two are left out where they are ignored, as nohup
    does with a terminal; all are whose handler is not Python's, which could not be set again. On Windows one process
    can send another nothing but Ctrl-Break, which counts as well.
    """
    asked = [signal.SIGINT, signal.SIGTERM]
    here = [getattr(signal, name, None) for name in ("SIGHUP", "SIGUSR1", "SIGBREAK")]
    asked += [number for number in here if number and signal.getsignal(number) is not signal.SIG_IGN]
    return [number for number in asked if signal.getsignal(number) is not None]


def on_stop(heard: Callable[[int, Any], object], once: bool = False) -> Callable[[], None]:
    """Let a function handle the signals that ask to stop, `once` or until the returned function is called.

    Then they do again what they did before. Python lets the main thread alone set handlers: in another one, of a
    notebook or a Ray actor say, no signal is heard.
    """
    before: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, frame: Any) -> None:
        if once:
            restore()
        heard(number, frame)

    if threading.current_thread() is threading.main_thread():
        for number in stop_signals():
            before[number] = signal.signal(number, handle)
    return restore


def tell_at_once(text: str) -> None:
    """Write a line to standard error from a signal's handler, which may not wait for Python's own buffers."""
    with contextlib.suppress(OSError):  # the terminal is gone
        os.write(2, f"\n{text}\n".encode())


def stamp() -> str:
    """Return the time for a folder's name."""
    return time.strftime("%Y%m%d-%H%M%S")
