"""Pictures of a run: its learning curve, scores over levels of noise, and films of episodes."""

from __future__ import annotations

import io
import os
import tempfile
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from noisy_envs.training.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[Any]
Picture = npt.NDArray[np.uint8]

FILMS = {".gif": ("PIL", "pillow"), ".mp4": ("imageio_ffmpeg", "imageio-ffmpeg")}  # what writes them: module, package
MAX_FPS = 50  # players show a GIF's shorter frames more slowly
EXACT = 128  # colours of a GIF's 256 that are kept to the digit


def plot_curve(
    path: Path, rows: list[dict[str, float]], random: float, oracle: float, title: str, ceiling: str = "oracle"
) -> None:
    """Draw returns over steps, between the lines of random play and of the oracle where they differ, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    played = [row for row in rows if np.isfinite(row["charts/episodic_return"])]
    steps = [row["global_step"] for row in played]
    returns = [row["charts/episodic_return"] for row in played]
    known = np.isfinite([random, oracle]).all() and random != oracle
    if known:
        axes.axhline(oracle, color="#14782c", linestyle="--", label=f"{ceiling} {oracle:.2f}")
    axes.plot(steps, returns, color="#142caa", marker=".", label="training, mean over episodes")
    if known:
        axes.axhline(random, color="#c0392b", linestyle=":", label=f"random {random:.2f}")

    def to_score(y: Any) -> Any:
        return (y - random) / (oracle - random)

    def to_return(score: Any) -> Any:
        return random + score * (oracle - random)

    if known:
        score = axes.secondary_yaxis("right", functions=(to_score, to_return))
        score.set_ylabel("normalised score")
    axes.set(xlabel="environment steps", ylabel="episodic return", title=title)
    axes.grid(alpha=0.25)
    axes.legend(loc="center right")
    write_png(path, figure)


def plot_scores(path: Path, rows: Sequence[dict[str, Any]], ceiling: str = "oracle") -> None:
    """Draw the scores of an evaluation, noise in training × noise in evaluation, both ascending, as `plot_matrix` does.

    Args:
        path: of the PNG.
        rows: results of each run in turn, at the same noises: `run`, `seed`, `env_id`, `trained`, `evaluated` (noise
            tokens), `score`, `score_95`.
        ceiling: whose return has the score 1.
    """
    found = {(row["run"], row["evaluated"]): row for row in rows}
    noises = sorted({row["evaluated"] for row in rows}, key=lambda noise: np.ravel(noise).tolist())
    by_run = {row["run"]: row for row in rows}
    trained = sorted(by_run.values(), key=lambda row: (np.ravel(row["trained"]).tolist(), row["seed"]))
    labels = [str(row["trained"]) for row in trained]
    for name in ([f"seed {row['seed']}" for row in trained], [Path(row["run"]).name for row in trained]):
        if len(set(labels)) < len(labels):  # several of one noise: say which
            labels = [f"{row['trained']}, {own}" for row, own in zip(trained, name, strict=True)]
    cells = [[found[row["run"], noise] for noise in noises] for row in trained]
    values = np.array([[cell["score"] for cell in line] for line in cells])
    lows, highs = (np.array([[cell["score_95"][side] for cell in line] for line in cells]) for side in (0, 1))
    columns = [str(noise) for noise in noises]
    title = f"normalised score, {rows[0]['env_id']}"
    plot_matrix(path, values, lows, highs, labels, columns, title, "noise in training", "noise in evaluation", ceiling)


def plot_matrix(
    path: Path,
    values: Array,
    lows: Array,
    highs: Array,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    row_label: str,
    column_label: str,
    ceiling: str = "oracle",
) -> None:
    """Draw normalised scores (R, C), say training noise × evaluation noise, as coloured cells with numbers, as a PNG.

    The colours run from 0, random play, to 1, the ceiling, in every figure, so that two of them compare.

    Args:
        path: of the PNG.
        values: scores (R, C); NaN leaves a cell empty.
        lows, highs: ends of the intervals (R, C); NaN leaves one out.
        rows, columns: R and C names, of the first row at the top and the first column at the left.
        title: of the figure.
        row_label, column_label: what rows and columns are.
        ceiling: whose return has the score 1.

    Raises:
        ValueError: for shapes that differ.
    """
    from matplotlib.figure import Figure

    shape = (len(rows), len(columns))
    for name, array in {"values": values, "lows": lows, "highs": highs}.items():
        if np.shape(array) != shape or 0 in shape:
            raise ValueError(f"{name} must have a row for each of rows and columns, {shape}, got {np.shape(array)}")
    width, height = max(4.6, 2.2 + 0.95 * shape[1]), max(1.1, 0.62 * shape[0])  # of the figure and of its cells, inches
    figure = Figure(figsize=(width, 1.5 + height), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(np.ma.masked_invalid(values), cmap="viridis", vmin=0, vmax=1, aspect="auto")
    for row, column in np.argwhere(np.isfinite(values)):
        color = "white" if values[row, column] < 0.6 else "#202020"
        _label_cell(axes, row, column, [array[row, column] for array in (values, lows, highs)], color)
    axes.set_xticks(range(shape[1]), columns)
    axes.set_yticks(range(shape[0]), rows)
    axes.set(xlabel=column_label, ylabel=row_label)
    axes.set_xticks(np.arange(1, shape[1]) - 0.5, minor=True)
    axes.set_yticks(np.arange(1, shape[0]) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    figure.suptitle(textwrap.fill(title, int(12 * width)), fontsize=11)
    bar = figure.colorbar(image, ax=axes, extend="both", extendfrac=0.12 / height, aspect=height / 0.16, pad=0.03)
    bar.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0 random", "0.25", "0.5", "0.75", f"1 {ceiling}"])
    bar.set_label("normalised score")
    write_png(path, figure)


def _label_cell(axes: Axes, row: int, column: int, numbers: Sequence[float], color: str) -> None:
    """Write a score in its cell, and below it the interval, if it is known: `numbers` are value, low, high."""
    value, low, high = (f"{round(number, 2) + 0.0:.2f}" for number in numbers)  # + 0.0 spares "-0.00"
    style: dict[str, Any] = {"ha": "center", "va": "center", "color": color, "textcoords": "offset points"}
    known = np.isfinite(numbers).all()
    axes.annotate(value, (column, row), (0, 6 if known else 0), fontsize=11, fontweight="bold", **style)
    if known:
        axes.annotate(f"{low} to {high}", (column, row), (0, -8), fontsize=7.5, **style)


def write_png(path: Path, figure: Figure) -> None:
    """Write a figure without the global state of pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    write_atomically(path, buffer.getvalue())


def check_video_path(path: Path) -> None:
    """Refuse a path to which `write_video` could not write, before an episode is played for it.

    Raises:
        ValueError: for a suffix but .gif and .mp4, or without the package that writes it.
        FileExistsError: nothing is ever overwritten.
        NotADirectoryError, PermissionError: its folder cannot be made, or not be written.
    """
    if path.suffix.lower() not in FILMS:
        raise ValueError(f"a video must end in {' or '.join(FILMS)}, got {path}")
    module, package = FILMS[path.suffix.lower()]
    if find_spec(module) is None:
        raise ValueError(f"{path} needs a package that is not installed: pip install {package}")
    if path.exists():
        raise FileExistsError(f"{path} exists; take another name, or remove it first")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise NotADirectoryError(f"{path} cannot be made: {folder} is not a folder")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{path} cannot be made: {folder} may not be written")


def write_video(path: Path, frames: Sequence[Picture], fps: int) -> None:
    """Write images (H, W, 3) of one size as a new GIF or MP4, by the suffix; its folder is made.

    Raises:
        ValueError: for frames or `fps` (1 to 50) that make no video.
        OSError, ValueError: for the path, see `check_video_path`.
    """
    check_video_path(path)
    _check_frames(frames, fps)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".gif":
        write_gif(path, frames, fps)
    else:
        _write_mp4(path, frames, fps)


def write_gif(path: Path, frames: Sequence[Picture], fps: int) -> None:
    """Write images (H, W, 3) of one size as an endless GIF, in place of the one that was there.

    Raises:
        ValueError: for frames or `fps` (1 to 50) that make no video.
    """
    from PIL import Image

    _check_frames(frames, fps)
    palette = _palette(np.concatenate(frames[:: max(1, len(frames) // 8)]))  # one for all, or colours would flicker
    packed = [_packed(frame) for frame in frames]
    shown = np.zeros(256**3, bool)
    for picture in packed:
        shown[picture] = True
    place = np.zeros(256**3, np.uint8)  # of a colour in the palette; Pillow's own search takes neighbours for one
    for color in np.flatnonzero(shown):
        place[color] = np.square(palette - _unpacked(color)).sum(axis=1).argmin()
    images = [Image.fromarray(place[picture]) for picture in packed]
    for image in images:
        image.putpalette(palette.astype(np.uint8).tobytes())
    buffer = io.BytesIO()
    images[0].save(buffer, "GIF", save_all=True, append_images=images[1:], duration=1000 // fps, loop=0)
    write_atomically(path, buffer.getvalue())


def _palette(pixels: Picture) -> Array:
    """Return 256 colours (256, 3): the most frequent of the pixels (H, W, 3) as they are, the others summed up.

    Markers are few pixels of a colour of their own, halos many of colours that hardly differ.
    """
    from PIL import Image

    packed = _packed(pixels)
    colors, counts = np.unique(packed, return_counts=True)
    kept = colors[np.argsort(-counts)[:EXACT]]
    others = pixels[~np.isin(packed, kept)]  # (n, 3)
    if not len(others):
        return _unpacked(np.resize(kept, 256))
    summed = Image.fromarray(others[None]).quantize(256 - EXACT).getpalette() or []
    return np.resize(np.concatenate([_unpacked(kept), np.reshape(summed, (-1, 3))]), (256, 3))


def _packed(pixels: Picture) -> Array:
    """Turn pixels (..., 3) into one number each."""
    return pixels.astype(np.int32) @ np.array([65536, 256, 1], np.int32)


def _unpacked(numbers: Any) -> Array:
    """Turn such numbers into pixels again, whole numbers (..., 3)."""
    return np.stack([numbers >> 16, numbers >> 8 & 255, numbers & 255], axis=-1)


def _write_mp4(path: Path, frames: Sequence[Picture], fps: int) -> None:
    """Write images (H, W, 3) as H.264, which every browser plays."""
    import imageio_ffmpeg

    height, width, _ = frames[0].shape
    margins = ((0, height % 2), (0, width % 2), (0, 0))  # H.264 halves the colours' resolution: sizes must be even
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        unfinished = Path(folder) / "video.mp4"
        size = (width + width % 2, height + height % 2)
        writer = imageio_ffmpeg.write_frames(unfinished, size, fps=fps, quality=8, macro_block_size=2)
        writer.send(None)
        for frame in frames:
            writer.send(np.ascontiguousarray(np.pad(frame, margins, mode="edge")))
        writer.close()
        written = imageio_ffmpeg.count_frames_and_secs(unfinished)[0]  # ffmpeg's exit status is not handed on
        if written != len(frames):
            raise OSError(f"ffmpeg wrote {written} of {len(frames)} frames of {path}")
        unfinished.replace(path)


def _check_frames(frames: Sequence[Picture], fps: int) -> None:
    if not 1 <= fps <= MAX_FPS:
        raise ValueError(f"fps must be 1 to {MAX_FPS}, got {fps}")
    if not len(frames):
        raise ValueError("a video must have a frame, got none")
    for number, frame in enumerate(frames):
        if frame.dtype != np.uint8 or frame.shape != (*frames[0].shape[:2], 3):
            raise ValueError(
                f"frames must be uint8 of one shape (H, W, 3), got {frame.dtype} {frame.shape} as frame {number}, "
                f"{frames[0].shape} as frame 0"
            )
