"""Keeping what a training run makes: its folder, metrics, checkpoints, pictures. Nothing here learns.

Agents import this, so that their files hold what teaches about learning. No file is ever half written, and no run
writes into the folder of another.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that it holds either its old or its new content, whenever the process dies."""
    data = content.encode() if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)  # mkstemp is private; a result is as readable as any other file
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def new_folder(parent: Path, name: str) -> Path:
    """Make the folder `parent/name`, or `name-2`, `name-3`, … where it is taken; two processes never share one."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def environment_seed(seed: int, purpose: str) -> int:
    """Hash a run's seed and a purpose ("train", "evaluate") to a seed of environments.

    World i takes this seed + i: runs seeded 1, 2, 3 would share worlds if they used their seeds as they are.
    """
    digest = hashlib.blake2b(f"{seed} {purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def commit() -> str:
    """Return the commit of the code in use, marked "+" if files differ from it, or "unknown" outside a checkout."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
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
    }


class Metrics:
    """Writes scalars to `metrics.csv` and to TensorBoard; a resumed run continues both.

    Args:
        folder: of the run.
        names: the columns, beside `global_step`.
        resume_at: drop rows beyond this step, which a checkpoint does not know.
    """

    def __init__(self, folder: Path, names: Sequence[str], resume_at: int | None = None) -> None:
        """Open both; see the class."""
        from torch.utils.tensorboard import SummaryWriter

        self.path, self.names = folder / "metrics.csv", ("global_step", *names)
        self.rows: list[dict[str, float]] = []
        if resume_at is not None and self.path.exists():
            self.rows = [row for row in read_metrics(self.path) if row["global_step"] <= resume_at]
        write_atomically(self.path, self._text(self.rows, header=True))
        self._board = SummaryWriter(str(folder), purge_step=None if resume_at is None else resume_at + 1)

    def add(self, step: int, values: dict[str, float]) -> None:
        """Record one value for each name at a step."""
        row = {"global_step": step, **values}
        self.rows.append(row)
        with self.path.open("a", newline="") as file:
            file.write(self._text([row], header=False))
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def note(self, name: str, content: dict[str, Any]) -> None:
        """Show settings in TensorBoard, as a table."""
        rows = "\n".join(f"|{key}|{value}|" for key, value in content.items())
        self._board.add_text(name, f"|name|value|\n|-|-|\n{rows}")

    def close(self) -> None:
        """Flush and close TensorBoard's file."""
        self._board.close()

    def _text(self, rows: list[dict[str, float]], header: bool) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.names, lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read a `metrics.csv`; a last line cut short by a kill is left out."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        rows = [row for row in reader if None not in row.values()]
    return [{name: float(value) for name, value in row.items()} for row in rows]


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Save tensors, numbers and texts, atomically."""
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_atomically(path, buffer.getvalue())


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load a checkpoint onto the CPU, without running code from it.

    Raises:
        FileNotFoundError, ValueError: naming the path.
    """
    import torch

    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen types for a damaged file
        raise ValueError(f"{path} is no checkpoint of an agent: {error}") from error
    return content


def plot_curve(path: Path, rows: list[dict[str, float]], random: float, oracle: float, title: str) -> None:
    """Draw returns over steps, between the lines of random play and of the oracle, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    played = [row for row in rows if np.isfinite(row["charts/episodic_return"])]
    steps = [row["global_step"] for row in played]
    returns = [row["charts/episodic_return"] for row in played]
    axes.axhline(oracle, color="#14782c", linestyle="--", label=f"oracle {oracle:.2f}")
    axes.plot(steps, returns, color="#142caa", marker=".", label="training, mean over episodes")
    axes.axhline(random, color="#c0392b", linestyle=":", label=f"random {random:.2f}")

    def to_score(y: Any) -> Any:
        return (y - random) / (oracle - random)

    def to_return(score: Any) -> Any:
        return random + score * (oracle - random)

    score = axes.secondary_yaxis("right", functions=(to_score, to_return))
    score.set_ylabel("normalised score")
    axes.set(xlabel="environment steps", ylabel="episodic return", title=title)
    axes.grid(alpha=0.25)
    axes.legend(loc="center right")
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    write_atomically(path, buffer.getvalue())


def write_gif(path: Path, frames: Sequence[np.ndarray], fps: int) -> None:
    """Write images (H, W, 3) uint8 as an endless GIF."""
    from PIL import Image

    # one palette for all, or colours would flicker
    palette = Image.fromarray(np.concatenate(frames[:: max(1, len(frames) // 4)])).quantize(64)
    images = [Image.fromarray(frame).quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    buffer = io.BytesIO()
    images[0].save(buffer, "GIF", save_all=True, append_images=images[1:], duration=1000 // fps, loop=0)
    write_atomically(path, buffer.getvalue())


def write_summary(path: Path, content: dict[str, Any]) -> None:
    """Write a summary as JSON; what JSON lacks, NaN and infinity, becomes null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, float) and not np.isfinite(value):
            return None
        return str(value) if isinstance(value, Path) else value

    write_atomically(path, json.dumps(plain(content), indent=2, default=str) + "\n")


def bootstrap_interval(
    values: np.ndarray, seed: int, level: float = 0.95, resamples: int = 2000
) -> tuple[float, float]:
    """Return the bootstrapped confidence interval of the mean of values (n,)."""
    picked = np.random.default_rng(seed).integers(0, len(values), (resamples, len(values)))
    low, high = np.quantile(values[picked].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def stamp() -> str:
    """Return the time for a folder's name."""
    return time.strftime("%Y%m%d-%H%M%S")
