"""Scalars of a run: `metrics.csv`, TensorBoard, Weights & Biases."""

from __future__ import annotations

import csv
import io
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noisy_envs.training.checkpoint import to_json
from noisy_envs.training.files import naming, write_atomically


class ColumnMismatch(ValueError):
    """A `metrics.csv` has other columns than the rows to write."""


class MetricsLogger:
    """Writes scalars to `metrics.csv`, TensorBoard and Weights & Biases; a resumed run continues all of them.

    TensorBoard gets them at the next `flush`, which a run calls at each checkpoint.

    Args:
        folder: folder of the run.
        names: columns, without `global_step`.
        resume_at: step of the checkpoint; later rows are dropped.
        tracker: run of Weights & Biases that gets the rows too; its owner closes it.

    Raises:
        ValueError: the `metrics.csv` to continue is damaged, or `ColumnMismatch`.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], resume_at: int | None = None, tracker: WandbRun | None = None
    ) -> None:
        """Open the files; see the class."""
        from torch.utils.tensorboard import SummaryWriter

        self.path, self.names = folder / "metrics.csv", ("global_step", *names)
        self.rows: list[dict[str, float]] = []
        if resume_at is not None and self.path.exists():
            self.rows = [row for row in read_metrics(self.path) if row["global_step"] <= resume_at]
        if self.rows:
            self._check(self.rows[0])
        write_atomically(self.path, self._text(self.rows, header=True))
        board = SummaryWriter(str(folder), purge_step=None if resume_at is None else resume_at + 1)
        self._board: Any = board  # whose `file_writer` has no types
        self._unsent: list[tuple[dict[str, float], int, float]] = []  # values, step and time
        self._tracker = tracker

    def add(self, step: int, values: dict[str, float]) -> None:
        """Record one value for each name at a step."""
        row = {"global_step": step, **values}
        self._check(row)
        self.rows.append(row)
        with naming(self.path), open(self.path, "ab", buffering=0, opener=_open_existing) as file:
            file.write(self._text([row], header=False).encode())
        self._unsent.append((values, step, time.time()))
        if self._tracker is not None:
            self._tracker.log(step, values)

    def note(self, name: str, content: dict[str, Any]) -> None:
        """Show settings in TensorBoard, as a table."""
        rows = "\n".join(f"|{key}|{value}|" for key, value in content.items())
        self._board.add_text(name, f"|name|value|\n|-|-|\n{rows}")

    def flush(self) -> None:
        """Write the rows since the last call to TensorBoard's file, an event for each.

        TensorBoard writes in a thread, and at each event the two threads wait for each other. With an event for each
        number, this took most of the time that many runs need to log an update.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        for values, *place in self._unsent:
            scalars = [{"tag": name, "simple_value": value} for name, value in values.items()]
            self._board.file_writer.add_summary(Summary(value=scalars), *place)
        self._unsent.clear()
        self._board.flush()

    def close(self) -> None:
        """Flush and close TensorBoard's file."""
        self.flush()
        self._board.close()

    def _check(self, row: dict[str, float]) -> None:
        if row.keys() != set(self.names):
            differing = ", ".join(sorted(row.keys() ^ set(self.names)))
            raise ColumnMismatch(
                f"{self.path}: expected the same columns in all rows, but these differ: {differing}; "
                "resume a run with the version of the program that started it"
            )

    def _text(self, rows: list[dict[str, float]], header: bool) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.names, lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


def _open_existing(path: str, flags: int) -> int:
    """Open a file without creating it: a new one would lack its header."""
    return os.open(path, flags & ~os.O_CREAT)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read a `metrics.csv`, without the last line if it is incomplete.

    Raises:
        ValueError: another line does not hold a number for each column; the message names it.
    """
    whole = path.read_bytes().rpartition(b"\n")[0]  # a line without its end may hold half a number
    header, *lines = whole.decode(errors="replace").split("\n")
    names, rows = next(csv.reader([header])), []
    for number, line in enumerate(lines, 2):
        try:
            step, *values = map(float, next(csv.reader([line])))
            rows.append(dict(zip(names, [int(step), *values], strict=True)))
        except (ValueError, csv.Error):
            if number <= len(lines):
                raise ValueError(f"{path}, line {number}: expected {len(names)} numbers, got {line!r}") from None
    return rows


def import_wandb() -> Any:
    """Import the package of Weights & Biases.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ValueError(f"tracking needs Weights & Biases ({error}): pip install wandb") from None
    if not hasattr(wandb, "init"):  # runs leave a folder `wandb`, which Python imports as a package
        raise ValueError("tracking needs Weights & Biases (there is only a folder of that name): pip install wandb")
    return wandb


class WandbRun:
    """Sends a run's scalars to Weights & Biases; `start_wandb` makes it."""

    def __init__(self, run: Any) -> None:
        """Take a run from `wandb.init`."""
        self._run = run

    def log(self, step: int, values: dict[str, float]) -> None:
        """Send one value for each name at a step.

        Steps that were sent before are skipped: a resumed run repeats those after its checkpoint.
        """
        if step >= self._run.starting_step:
            self._run.log(values, step=step)

    def summarize(self, values: dict[str, Any]) -> None:
        """Add results of the whole run, such as its evaluation."""
        self._run.summary.update(to_json(values))

    def close(self) -> None:
        """Send the remaining data and finish."""
        self._run.finish()


def start_wandb(project: str, name: str, config: dict[str, Any], folder: Path, resume: bool) -> WandbRun:
    """Start or resume a run on Weights & Biases.

    Args:
        project: name of the project.
        name: name of the run.
        config: settings to show.
        folder: folder of the run, which keeps the run's ID in `wandb_id`.
        resume: whether to continue the run of that ID, if there is one.

    Raises:
        ValueError: Weights & Biases is not installed, or did not start, for example without a login.
    """
    wandb = import_wandb()
    known = folder / "wandb_id"
    if not (resume and known.exists()):
        write_atomically(known, secrets.token_hex(4) + "\n")
    try:
        run = wandb.init(
            project=project,
            name=name,
            config=to_json(config),
            dir=folder,
            id=known.read_text(encoding="utf-8").strip(),
            resume="allow" if resume else None,
        )
    except wandb.Error as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(f"Weights & Biases did not start: {reason}; WANDB_MODE=offline needs no account") from None
    return WandbRun(run)
