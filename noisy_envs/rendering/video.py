"""Videos of episodes, as GIF or MP4."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from noisy_envs.training.files import write_atomically

Array = npt.NDArray[Any]
Picture = npt.NDArray[np.uint8]

VIDEO_WRITERS = {
    ".gif": ("PIL", "pillow"),
    ".mp4": ("imageio_ffmpeg", "imageio-ffmpeg"),
}  # suffix -> module and package that write it
MAX_FPS = 50  # players slow down GIFs with shorter frames
NUM_EXACT_COLORS = 128  # of the 256 colours of a GIF, those that are kept exactly


def check_video_path(path: Path) -> None:
    """Raise an error for a path that `write_video` could not write, before an episode is played for it.

    Raises:
        ValueError: the suffix is not .gif or .mp4, or the package that writes it is missing.
        FileExistsError: the file exists; it is never overwritten.
        NotADirectoryError, PermissionError: the folder cannot be made, or is not writable.
    """
    if path.suffix.lower() not in VIDEO_WRITERS:
        raise ValueError(f"{path}: expected a file name that ends in {' or '.join(VIDEO_WRITERS)}")
    module, package = VIDEO_WRITERS[path.suffix.lower()]
    if find_spec(module) is None:
        raise ValueError(f"{path}: writing it requires {package}: pip install {package}")
    if path.exists():
        raise FileExistsError(f"{path} exists: choose another name, or remove it first")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise NotADirectoryError(f"{path} cannot be written: {folder} is not a folder")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{path} cannot be written: no permission to write in {folder}")


def write_video(path: Path, frames: Sequence[Picture], fps: int) -> None:
    """Write images (H, W, 3) of one size as a new GIF or MP4, chosen by the suffix; make its folder.

    Raises:
        ValueError: there are no frames, they differ in size, or `fps` is not from 1 to 50.
        OSError, ValueError: the path cannot be written, see `check_video_path`.
    """
    check_video_path(path)
    _check_frames(frames, fps)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".gif":
        write_gif(path, frames, fps)
    else:
        _write_mp4(path, frames, fps)


def write_gif(path: Path, frames: Sequence[Picture], fps: int) -> None:
    """Write images (H, W, 3) of one size as a GIF that repeats forever, and replace any older file.

    All frames share one palette, so that colours do not flicker. Pillow's own quantiser is not used: it turns the white
    background into grey (251), and maps similar colours to one, so that grid lines change colour near halos.

    Raises:
        ValueError: there are no frames, they differ in size, or `fps` is not from 1 to 50.
    """
    from PIL import Image

    _check_frames(frames, fps)
    palette = _palette(np.concatenate(frames[:: max(1, len(frames) // 8)]))
    packed = [_pack(frame) for frame in frames]
    used = np.zeros(256**3, bool)
    for picture in packed:
        used[picture] = True
    index = np.zeros(256**3, np.uint8)  # of the nearest colour in the palette, for each packed colour
    for color in np.flatnonzero(used):
        index[color] = np.square(palette - _unpack(color)).sum(axis=1).argmin()
    images = [Image.fromarray(index[picture]) for picture in packed]
    for image in images:
        image.putpalette(palette.astype(np.uint8).tobytes())
    buffer = io.BytesIO()
    images[0].save(buffer, "GIF", save_all=True, append_images=images[1:], duration=1000 // fps, loop=0)
    write_atomically(path, buffer.getvalue())


def _palette(pixels: Picture) -> Array:
    """Return 256 colours (256, 3) for pixels (H, W, 3): the most frequent ones exactly, the others quantised.

    A marker has few pixels of one colour; halos have many pixels whose colours hardly differ.
    """
    from PIL import Image

    packed = _pack(pixels)
    colors, counts = np.unique(packed, return_counts=True)
    exact = colors[np.argsort(-counts)[:NUM_EXACT_COLORS]]
    others = pixels[~np.isin(packed, exact)]  # (n, 3)
    if not len(others):
        return _unpack(np.resize(exact, 256))
    quantised = Image.fromarray(others[None]).quantize(256 - NUM_EXACT_COLORS).getpalette() or []
    return np.resize(np.concatenate([_unpack(exact), np.reshape(quantised, (-1, 3))]), (256, 3))


def _pack(pixels: Picture) -> Array:
    """Pack each pixel (..., 3) into one integer."""
    return pixels.astype(np.int32) @ np.array([65536, 256, 1], np.int32)


def _unpack(numbers: Any) -> Array:
    """Return the pixels (..., 3) of packed integers, as integers."""
    return np.stack([numbers >> 16, numbers >> 8 & 255, numbers & 255], axis=-1)


def _write_mp4(path: Path, frames: Sequence[Picture], fps: int) -> None:
    """Write images (H, W, 3) as H.264, which all browsers play."""
    import imageio_ffmpeg

    height, width, _ = frames[0].shape
    margins = ((0, height % 2), (0, width % 2), (0, 0))  # sizes must be even: H.264 halves the resolution of colours
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        unfinished = Path(folder) / "video.mp4"
        size = (width + width % 2, height + height % 2)
        writer = imageio_ffmpeg.write_frames(unfinished, size, fps=fps, quality=8, macro_block_size=2)
        writer.send(None)
        for frame in frames:
            writer.send(np.ascontiguousarray(np.pad(frame, margins, mode="edge")))
        writer.close()
        written = imageio_ffmpeg.count_frames_and_secs(unfinished)[0]  # imageio hides ffmpeg's exit status
        if written != len(frames):
            raise OSError(f"ffmpeg wrote {written} of {len(frames)} frames of {path}")
        unfinished.replace(path)


def _check_frames(frames: Sequence[Picture], fps: int) -> None:
    if not 1 <= fps <= MAX_FPS:
        raise ValueError(f"fps={fps}: expected 1 to {MAX_FPS}")
    if not len(frames):
        raise ValueError("frames: expected at least one, got none")
    for number, frame in enumerate(frames):
        if frame.dtype != np.uint8 or frame.shape != (*frames[0].shape[:2], 3):
            raise ValueError(
                f"frames: expected uint8 of one shape (H, W, 3), got {frame.dtype} {frame.shape} as frame {number}, "
                f"{frames[0].shape} as frame 0"
            )
