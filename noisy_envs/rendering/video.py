"""Films of episodes, GIF or MP4."""

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
}  # what writes them: module, package
MAX_FPS = 50  # players show a GIF's shorter frames more slowly
EXACT_COLOURS = 128  # colours of a GIF's 256 that are kept to the digit


def check_video_path(path: Path) -> None:
    """Refuse a path to which `write_video` could not write, before an episode is played for it.

    Raises:
        ValueError: for a suffix but .gif and .mp4, or without the package that writes it.
        FileExistsError: nothing is ever overwritten.
        NotADirectoryError, PermissionError: its folder cannot be made, or not be written.
    """
    if path.suffix.lower() not in VIDEO_WRITERS:
        raise ValueError(f"a video must end in {' or '.join(VIDEO_WRITERS)}, got {path}")
    module, package = VIDEO_WRITERS[path.suffix.lower()]
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
    kept = colors[np.argsort(-counts)[:EXACT_COLOURS]]
    others = pixels[~np.isin(packed, kept)]  # (n, 3)
    if not len(others):
        return _unpacked(np.resize(kept, 256))
    summed = Image.fromarray(others[None]).quantize(256 - EXACT_COLOURS).getpalette() or []
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
