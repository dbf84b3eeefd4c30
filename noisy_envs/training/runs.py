"""Keeping what a training run makes: its folder, metrics, checkpoints, pictures. Nothing here learns.

Agents import this alone, so that their files hold what teaches about learning; what other files need as well, it takes
from `files` and `pictures`. No file is ever half written, and no run writes into the folder of another.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import hashlib
import io
import json
import multiprocessing
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
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from noisy_envs.training.files import lock, naming, new_folder, write_atomically  # noqa: F401  agents import this module alone
from noisy_envs.training.pictures import (  # noqa: F401  too
    check_video_path,
    plot_curve,
    plot_matrix,
    plot_scores,
    write_gif,
    write_video,
)

Settings = TypeVar("Settings")


def parse_arguments(
    kind: type[Settings], argv: Sequence[str], default: Settings, description: str | None = None
) -> Settings:
    """Read the settings of a dataclass from the command line, by tyro; all else is as in `default`.

    Raises:
        ValueError: a flag has a value, or a path is not text, naming it.
    """
    import tyro

    flags = {name.replace("_", "-") for name, value in vars(default).items() if isinstance(value, bool)}
    for word, following in pairwise([*argv, ""]):
        flag, equals, value = word.replace("_", "-").partition("=")
        name = flag.removeprefix("--").removeprefix("no-")
        if flag.startswith("--") and name in flags and (equals or (following and not following.startswith("-"))):
            raise ValueError(f"{flag} {value or following}: expected the flag alone, --{name} or --no-{name}")
    args = tyro.cli(kind, args=argv, default=default, description=description)
    for name, value in vars(args).items():
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path):
                check_path(name, path)
    return args


def check_path(name: str, path: Path) -> None:
    """Raise ValueError unless a path is text: TensorBoard and tables cannot hold bytes that are no UTF-8."""
    if re.search("[\0\ud800-\udfff]", str(path)):
        raise ValueError(f"{name}={str(path)!r}: expected a path of UTF-8 text")


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
    """Return the commit of the code in use, marked "+" if files differ from it, or "unknown" and why.

    It stays what it was when first asked for, as the code that a process has loaded does. The variable
    NOISY_ENVS_COMMIT sets it where code runs without its history, in a container for example. In a checkout whose
    commit git does not tell, the reason is printed as well, once.
    """
    given = os.environ.get("NOISY_ENVS_COMMIT")
    if given:
        return given
    file = Path(__file__)

    def git(*words: str) -> str:
        environment = os.environ | {"LC_ALL": "C"}
        try:
            done = subprocess.run(
                ["git", *words], cwd=file.parent, env=environment, capture_output=True, check=True,
                encoding="utf-8", errors="replace",
            )  # fmt: skip
        except subprocess.CalledProcessError as error:
            raise OSError(error.stderr.strip().partition("\n")[0] or str(error)) from None
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)  # installed, it may lie in a repository of something else
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except OSError as error:
        if not (file.parents[2] / ".git").exists():
            return "unknown (not a git checkout)"
        reason = "git is not installed" if isinstance(error, FileNotFoundError) else str(error)
        remedy = "set NOISY_ENVS_COMMIT to record it"
        if "dubious ownership" in reason:
            remedy = f"run: git config --global --add safe.directory {file.resolve().parents[2]}"
        if multiprocessing.parent_process() is None:  # which says it for its children
            print(f"the commit of this code is not recorded: {reason}; {remedy}", file=sys.stderr)
        return f"unknown ({reason})"


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
        with naming(self.path), open(self.path, "a", newline="", encoding="utf-8", opener=_open_existing) as file:
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


def _open_existing(path: str, flags: int) -> int:
    """Open a file without making it: one that vanished would begin again without its header."""
    return os.open(path, flags & ~os.O_CREAT)


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


def only_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the paths of runs, and name the folders that are none, which `runs/*` holds too.

    If none is a run, all are returned: to load them names what is missing, as it does for a run without a checkpoint.
    """
    found = [
        path for path in paths if not path.is_dir() or (path / "metrics.csv").exists() or checkpoint_path(path).exists()
    ]
    if found and len(found) < len(paths):
        others = ", ".join(str(path) for path in paths if path not in found)
        print(f"no runs, not evaluated: {others}", file=sys.stderr)
    return found or list(paths)


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


@contextlib.contextmanager
def memory_errors() -> Iterator[None]:
    """End a program in one line where it asks for more memory than there is; torch raises a RuntimeError."""
    try:
        yield
    except (MemoryError, OverflowError, RuntimeError) as error:
        line = (str(error).splitlines() or ["no more can be had"])[0]
        beyond = re.search("allocat|out of memory|size calculation|multiplication overflow", line)
        if isinstance(error, RuntimeError) and not beyond:
            raise
        reason = re.sub(r"^\[enforce fail[^]]*\] *(\. *)?", "", line)
        hint = "choose fewer or smaller environments, steps, episodes, sets or networks"
        raise SystemExit(f"error: not enough memory: {reason}; {hint}") from None


def check_memory(needs: Mapping[str, int], device: str) -> None:
    """Raise ValueError if a device cannot hold one of `needs`: float32 numbers, by the settings that ask for them.

    Linux grants more memory than there is, and kills the process that uses it.
    """
    import torch

    if torch.device(device).type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    elif hasattr(os, "sysconf"):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:  # Windows grants what there is
        return
    for settings, numbers in needs.items():
        if 4 * numbers > total:
            asked, there = (f"{number / 2**30:,.1f} GiB" for number in (4 * numbers, total))
            raise ValueError(f"not enough memory: {settings} need at least {asked}, {device} has {there}")


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
    """Return the signals that ask a process to stop, but those that it was started to ignore, as under nohup.

    They are Ctrl-C, SIGTERM, SIGHUP of a terminal that closes, and SIGUSR1, which Slurm can send before a time limit.
    On Windows one process can send another nothing but Ctrl-Break, which counts as well.
    """
    asked = [signal.SIGINT, signal.SIGTERM]
    here = [getattr(signal, name, None) for name in ("SIGHUP", "SIGUSR1", "SIGBREAK")]  # the last on Windows alone
    asked += [number for number in here if number and signal.getsignal(number) is not signal.SIG_IGN]
    return [number for number in asked if signal.getsignal(number) is not None]  # one of C could not be set again


@contextlib.contextmanager
def on_stop(handler: Callable[..., Any], once: bool = False) -> Iterator[None]:
    """Call `handler`(number, frame) at the signals that ask to stop; `once` restores what was before at the first.

    Python allows handlers in the main thread alone: in any other, what started the thread decides what signals do.
    """
    before: dict[signal.Signals, Any] = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def handle(number: int, frame: Any) -> None:
        if once:
            restore()
        handler(number, frame)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                before[number] = signal.signal(number, handle)
        yield
    finally:
        restore()


def tell_at_once(text: str) -> None:
    """Write a line to standard error from a signal's handler, which may not wait for Python's own buffers."""
    with contextlib.suppress(OSError):  # the terminal is gone
        os.write(2, f"\n{text}\n".encode())


def stamp() -> str:
    """Return the time for a folder's name."""
    return time.strftime("%Y%m%d-%H%M%S")
