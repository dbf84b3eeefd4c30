"""Images to classify: load, verify, normalize, augment, cut into patches, hide among patches of other images.

The paper's experiments (section 4.5, appendix C.7) use `cifar10` and `cifar100`; `fashion-mnist` and `digits` serve
machines without a network. `clutter` is not in the paper: it sets the signal-to-noise ratio k/N of section 3.1, which
is unknown for CIFAR.

Shapes: `B` images of a batch, `M` of a data set, `C` channels, `S` image size, `T` canvas size in pixels, `N` patches.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import math
import struct
import sys
import tarfile
import threading
import urllib.error
import urllib.request
import zlib
from concurrent.futures import Future
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

import numpy as np
import torch
from chance import below
from torch import Tensor
from torch.nn import functional

from noisy_envs.training.files import write_atomically

NAMES = ("cifar10", "cifar100", "fashion-mnist", "digits")
CIFAR_URL = "https://www.cs.toronto.edu/~kriz/"
FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package dataset-fashion-mnist
MAX_BYTES = 2**28  # of an unpacked file or member, 256 MiB; the largest of CIFAR-100 has 154 million
NUM_CROP = 3  # random numbers to crop an image, see `augment`
TIMEOUT = 4.0  # seconds without data after which a download fails


class Images(NamedTuple):
    """A data set of square images."""

    train: Tensor  # uint8 (M, C, S, S)
    train_labels: Tensor  # int64 (M,), from 0
    test: Tensor  # uint8, with another M
    test_labels: Tensor  # int64
    num_classes: int
    flip: bool  # whether mirrored images keep their labels


class Archive(NamedTuple):
    """A binary archive of CIFAR (https://www.cs.toronto.edu/~kriz/cifar.html): its file, its MD5 and its members."""

    file: str
    md5: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_bytes: int  # before the pixels; the last is the label, the one before it the superclass of CIFAR-100
    num_classes: int


BATCHES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR = {
    "cifar10": Archive(
        "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", BATCHES, ("test_batch.bin",), 1, 10
    ),
    "cifar100": Archive(
        "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", ("train.bin",), ("test.bin",), 2, 100
    ),
}
FASHION = {  # MD5 of the unpacked files: Debian compresses them differently, and the files of MNIST have the same names
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}


def load(name: str, data_dir: Path, download: bool = False) -> Images:
    """Load a data set, one of NAMES, from the files in `data_dir`.

    `cifar10` and `cifar100` are read from their archives; `fashion-mnist` from four idx files, plain or .gz, in
    `data_dir` or else in the folder of Debian's package; `digits`, 8x8, comes with scikit-learn. With `download`,
    missing files are downloaded to `data_dir` and verified.

    Raises:
        FileNotFoundError: a file is missing, and `download` is False.
        ConnectionError: the download failed; without a network, this takes at most 5 seconds.
        ValueError: the name is unknown, or a file has other content than expected.
        ModuleNotFoundError: scikit-learn is not installed.
    """
    if name in CIFAR:
        return _cifar(CIFAR[name], data_dir, download)
    if name == "fashion-mnist":
        return _fashion(data_dir, download)
    if name == "digits":
        return _digits()
    raise ValueError(f"dataset={name!r}: expected one of {', '.join(NAMES)}")


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (C,) of each channel, from 0 to 1, of uint8 images (M, C, S, S).

    They are computed from the counts of the 256 levels, so that rounding errors do not grow with M.

    Raises:
        ValueError: a channel is constant.
    """
    levels = torch.arange(256, dtype=torch.float64, device=images.device) / 255
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)])  # (C, 256)
    shares = counts.double() / counts.sum(dim=1, keepdim=True)
    mean = shares @ levels
    std = (shares * (levels - mean[:, None]) ** 2).sum(dim=1).sqrt()
    if not std.all():
        raise ValueError(f"images: expected channels that vary, got standard deviations {std.tolist()}")
    return mean.float(), std.float()


def normalize(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Convert uint8 images (B, C, S, S) to float32, and normalize each channel by its mean and deviation (C,)."""
    mean, std = (255 * value.to(images.device)[:, None, None] for value in (mean, std))
    return (images - mean) / std


def augment(images: Tensor, numbers: Tensor, padding: int, flip: bool) -> Tensor:
    """Pad and crop each image at random, and mirror half of them: (B, C, S, S) -> (B, C, S, S).

    The paper crops with a padding of 4 at S = 32. Padding is 0: black for uint8 images, as usual with torchvision, and
    the mean color for normalized ones. Numbers (B, NUM_CROP) from U[0, 1) set row, column and mirroring.
    """
    batch, channels, size, _ = images.shape
    device = images.device
    padded = functional.pad(images, [padding] * 4)
    span = torch.arange(size, device=device)
    row, column, mirror = numbers.unsqueeze(2).unbind(1)  # (B, 1) each
    rows, columns = below(row, 2 * padding + 1) + span, below(column, 2 * padding + 1) + span  # (B, S) each
    if flip:
        columns = torch.where(mirror < 0.5, columns, columns.flip(1))
    image = torch.arange(batch, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[:, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


def patches_per_side(size: int, patch_size: int) -> int:
    """Return the number of patches along each side of an image.

    Raises:
        ValueError: patches of this size do not fill the image.
    """
    if patch_size < 1 or size % patch_size:
        raise ValueError(f"patch_size={patch_size}: expected a divisor of the size of the image, {size} pixels")
    return size // patch_size


def patches(images: Tensor, patch_size: int) -> Tensor:
    """Cut images (B, C, S, S) into patches (B, N, C * patch_size²), both in row-major order."""
    batch, channels, size, _ = images.shape
    side = patches_per_side(size, patch_size)
    cut = images.reshape(batch, channels, side, patch_size, side, patch_size).permute(0, 2, 4, 1, 3, 5)
    return cut.reshape(batch, side * side, channels * patch_size * patch_size)


def focal_patches(grid_size: int) -> tuple[int, ...]:
    """Return the central patches of a square grid: four if its size is even (27, 28, 35, 36 of 8x8), else one.

    They are the paper's Focal query; its Corner query is patch 0.

    Raises:
        ValueError: the grid has no patch.
    """
    if grid_size < 1:
        raise ValueError(f"grid_size={grid_size}: expected at least 1")
    centre = range((grid_size - 1) // 2, grid_size // 2 + 1)
    return tuple(row * grid_size + column for row in centre for column in centre)


def clutter(
    images: Tensor, others: Tensor, canvas_size: int, patch_size: int, numbers: Tensor
) -> tuple[Tensor, Tensor]:
    """Place each image (B, C, S, S) on a canvas of patches of other images (M, C, S', S').

    The image lies anywhere on the canvas's grid of patches, with equal probability. Every other patch of the canvas is
    a random patch of a random image of `others`, which may be the image itself. So k/N is (S / T)².
    Numbers (B, `num_hide`) from U[0, 1) determine both.

    Returns:
        Canvases (B, C, T, T), where T is `canvas_size`, and a mask bool (B, N) of the image's patches.

    Raises:
        ValueError: the canvas is smaller than the image, patches do not fill one of them, or `others` differ from
            `images` in channels or type.
    """
    channels, size = images.shape[1:3]
    if (others.shape[1], others.dtype) != (channels, images.dtype):
        shape = tuple(others.shape)
        raise ValueError(f"others: expected {images.dtype} with {channels} channels, got {others.dtype} {shape}")
    if canvas_size < size:
        raise ValueError(f"canvas_size={canvas_size}: expected at least the size of the image, {size}")
    side, canvas_side = patches_per_side(size, patch_size), patches_per_side(canvas_size, patch_size)
    corner, image, place = numbers.split([2, canvas_side**2, canvas_side**2], dim=1)
    first = below(corner, canvas_side - side + 1).unsqueeze(2)  # row and column of the image's first patch (B, 2, 1)
    rows, columns = (first + torch.arange(side, device=images.device)).unbind(1)  # (B, side) each
    positions = (rows[:, :, None] * canvas_side + columns[:, None, :]).flatten(1)  # (B, k)
    tokens = _random_patches(others, patch_size, image, place)
    tokens = tokens.scatter(1, positions[:, :, None].expand(-1, -1, tokens.shape[2]), patches(images, patch_size))
    signal = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=images.device).scatter(1, positions, True)
    cut = tokens.unflatten(1, (canvas_side, canvas_side)).unflatten(3, (channels, patch_size, patch_size))
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, canvas_size, canvas_size), signal


def num_hide(canvas_size: int, patch_size: int) -> int:
    """Return how many random numbers hide an image on a canvas: two for its position, two for each patch."""
    return 2 + 2 * patches_per_side(canvas_size, patch_size) ** 2


def _random_patches(others: Tensor, patch_size: int, image: Tensor, place: Tensor) -> Tensor:
    """Choose patches of images (M, C, S', S') by two numbers (B, N) from U[0, 1) each: (B, N, C * patch_size²)."""
    side = patches_per_side(others.shape[2], patch_size)
    grid = others.unfold(2, patch_size, patch_size).unfold(3, patch_size, patch_size)  # a view (M, C, side, side, …)
    place = below(place, side * side)
    return grid[below(image, len(others)), :, place // side, place % side].flatten(2)


def _cifar(archive: Archive, data_dir: Path, download: bool) -> Images:
    """Read an archive's train and test records."""
    path = data_dir / archive.file
    packed = _read(path, CIFAR_URL + archive.file, archive.md5, download)
    members = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as tar:
            for member in tar:  # read into memory only, because a name may point outside the folder; links are skipped
                name = PurePosixPath(member.name).name
                file = tar.extractfile(member) if member.isfile() else None
                if file is not None and name in archive.train + archive.test:
                    if member.size > MAX_BYTES:
                        raise ValueError(f"{path}: {name} has {member.size} bytes, expected at most {MAX_BYTES}")
                    members[name] = file.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is incomplete or not an archive: {error}") from error
    train, test = (_records(members, names, archive, path) for names in (archive.train, archive.test))
    return Images(*train, *test, num_classes=archive.num_classes, flip=True)


def _records(members: dict[str, bytes], names: tuple[str, ...], archive: Archive, path: Path) -> tuple[Tensor, Tensor]:
    """Return images (M, 3, 32, 32) and labels (M,) of members, whose records are labels, red, green, blue."""
    length = archive.label_bytes + 3 * 32 * 32
    for name in names:
        if name not in members:
            raise ValueError(f"{path} has no {name}")
        if not members[name] or len(members[name]) % length:
            raise ValueError(f"{path}: {name} has {len(members[name])} bytes, expected a multiple of {length}")
    records = np.frombuffer(b"".join(members[name] for name in names), np.uint8).reshape(-1, length)
    pixels = records[:, archive.label_bytes :].reshape(-1, 3, 32, 32)
    return _pair(pixels, records[:, archive.label_bytes - 1], archive.num_classes, path)


def _fashion(data_dir: Path, download: bool) -> Images:
    """Read the four idx files of Fashion-MNIST."""
    sets = []
    for part in ("train", "t10k"):
        pixels, _ = _idx(data_dir, f"{part}-images-idx3-ubyte", 3, download)
        labels, path = _idx(data_dir, f"{part}-labels-idx1-ubyte", 1, download)
        sets.append(_pair(pixels[:, None], labels, 10, path))
    return Images(*sets[0], *sets[1], num_classes=10, flip=True)


def _idx(data_dir: Path, name: str, dimensions: int, download: bool) -> tuple[np.ndarray, Path]:
    """Return the array of bytes in an idx file, and the file's path.

    The format is described at the end of http://yann.lecun.com/exdb/mnist: the bytes 0, 0, 8 (for uint8) and the number
    of dimensions; each dimension as 4 bytes, big-endian; the array.
    """
    missing = data_dir / f"{name}.gz"
    places = [folder / file for folder in (data_dir, DEBIAN) for file in (name, missing.name)]
    path = next((place for place in places if place.is_file()), missing)
    data = _read(path, FASHION_URL + missing.name, FASHION[name], download)
    start, expected = 4 + 4 * dimensions, 0x800 + dimensions
    magic, *shape = struct.unpack(f">{1 + dimensions}I", data[:start].ljust(start, b"\0"))
    if magic != expected:
        raise ValueError(f"{path} starts with {magic:#x}, expected {expected:#x} for bytes in {dimensions} dimensions")
    if len(data) != start + math.prod(shape):
        raise ValueError(
            f"{path} holds {len(data) - start} bytes after its header, expected {math.prod(shape)} for {shape}"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape), path


def _pair(pixels: np.ndarray, labels: np.ndarray, num_classes: int, path: Path) -> tuple[Tensor, Tensor]:
    """Copy images and labels (int64) to tensors, after checking the number and the range of the labels."""
    if len(labels) != len(pixels):
        raise ValueError(f"{path} has {len(labels)} labels, expected {len(pixels)}, one per image")
    if labels.max(initial=0) >= num_classes:
        raise ValueError(f"{path} has a label {labels.max()}, expected at most {num_classes - 1}")
    return torch.from_numpy(pixels.copy()), torch.from_numpy(labels.astype(np.int64))


def _digits() -> Images:
    """Return the 1,797 digits of scikit-learn, with levels 0..16 scaled to 0..255; a fifth, 360, is the test set.

    They are shuffled in a fixed order: the file is sorted by writer, so its last fifth is by writers that do not occur
    in the rest.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("dataset='digits': needs scikit-learn, run: pip install scikit-learn") from error
    digits = load_digits()
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(digits.target))
    pixels = torch.from_numpy(digits.images[order] * (255 / 16)).round().to(torch.uint8)[:, None]
    labels = torch.from_numpy(digits.target[order]).long()
    cut = len(pixels) * 4 // 5
    return Images(pixels[:cut], labels[:cut], pixels[cut:], labels[cut:], num_classes=10, flip=False)


def _read(path: Path, url: str, md5: str, download: bool) -> bytes:
    """Return the verified content of a file, after downloading it if necessary."""
    exists = path.is_file()
    if not exists and not download:
        package = ", install Debian's package dataset-fashion-mnist" if url.startswith(FASHION_URL) else ""
        raise FileNotFoundError(f"{path} is missing: set its folder with --data-dir{package}, or download {url}")
    data = path.read_bytes() if exists else _fetch(url, path)
    content = _unpack(data, path)
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if digest != md5:
        raise ValueError(
            f"{path if exists else url} is incomplete or another file: its MD5 is {digest}, expected {md5}"
        )
    if not exists:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    return content


def _unpack(data: bytes, path: Path) -> bytes:
    """Decompress a .gz file; any other file, a .tar.gz too, stays as it is."""
    if path.suffixes != [".gz"]:
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is incomplete or not a gzip file: {error}") from error
    if len(content) > MAX_BYTES:
        raise ValueError(f"{path} unpacks to more than {MAX_BYTES} bytes: expected another file")
    return content


def _fetch(url: str, path: Path) -> bytes:
    """Download a URL; if that fails, the error says where to put the file instead."""
    print(f"downloading {url}", file=sys.stderr)
    try:
        with _open(url) as response:
            return response.read()
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        advice = f"download it elsewhere and put it at {path}, or set its folder with --data-dir"
        raise ConnectionError(f"{url} could not be downloaded ({str(error) or 'no answer'}); {advice}") from error


def _open(url: str) -> IO[bytes]:
    """Open a URL within TIMEOUT, which covers the look-up of its host too: urllib has no limit for that."""
    answer: Future[IO[bytes]] = Future()

    def ask() -> None:
        try:
            answer.set_result(urllib.request.urlopen(url, timeout=TIMEOUT))
        except Exception as error:  # raised again by `result`
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return answer.result(timeout=TIMEOUT)
