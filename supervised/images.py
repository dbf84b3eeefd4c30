"""Images to classify: read and checked, normalised, augmented, cut into patches, hidden among pieces of others.

The paper's experiments (section 4.5, appendix C.7) are on `cifar10` and `cifar100`; `fashion-mnist` and `digits` are
there for machines without a network. `clutter` is not the paper's: it sets the signal-to-noise ratio k/N of section 3.1
by hand, where CIFAR's own is unknown.

Shapes: `B` images of a batch, `M` of a set, `C` channels, `S` an image's side, `T` a canvas's, in pixels; `N` patches.
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
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist puts its files
LARGEST = 2**28  # bytes of an unpacked file or member, 256 MiB; CIFAR-100's largest has 154 million
CROP = 3  # numbers by which an image is cropped: see `augment`
PATIENCE = 4.0  # seconds without an answer, or without more of it, after which a download fails


class Images(NamedTuple):
    """A set of square images, for training and for the one look at the end."""

    train: Tensor  # uint8 (M, C, S, S)
    train_labels: Tensor  # int64 (M,), from 0
    test: Tensor  # uint8, of another M
    test_labels: Tensor  # int64
    num_classes: int
    flip: bool  # whether a mirrored image keeps its label


class Archive(NamedTuple):
    """One of CIFAR's binary archives (https://www.cs.toronto.edu/~kriz/cifar.html): its file, its hash, its members."""

    file: str
    md5: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_bytes: int  # before the pixels; the last is the label, the one before it CIFAR-100's superclass
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
FASHION = {  # the MD5 of each file, unpacked: Debian packs them anew, and MNIST's bear the same names
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}


def load(name: str, data_dir: Path, download: bool = False) -> Images:
    """Return a data set, one of NAMES, from the files in `data_dir`.

    `cifar10` and `cifar100` are read from the archives as they are downloaded, nothing is unpacked; `fashion-mnist`
    from four idx files, plain or .gz, in `data_dir` or else where Debian's package puts them; `digits`, 8x8, comes with
    scikit-learn. With `download` a file that is missing is fetched, checked and kept in `data_dir`.

    Raises:
        FileNotFoundError: a file is missing, and was not to be fetched.
        ConnectionError: it could not be fetched; told within 5 seconds where there is no network.
        ValueError: an unknown name, or a file that is not what it should be.
        ModuleNotFoundError: `digits` without scikit-learn.
    """
    if name in CIFAR:
        return _cifar(CIFAR[name], data_dir, download)
    if name == "fashion-mnist":
        return _fashion(data_dir, download)
    if name == "digits":
        return _digits()
    raise ValueError(f"unknown data set {name!r}, choose one of {', '.join(NAMES)}")


def statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return each channel's mean and standard deviation (C,), in 0..1, over all pixels of uint8 images (M, C, S, S).

    Exact at any M: they follow from how often each of the 256 levels occurs.

    Raises:
        ValueError: a channel is the same everywhere, so that nothing can be divided by its deviation.
    """
    levels = torch.arange(256, dtype=torch.float64, device=images.device) / 255
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)])  # (C, 256)
    shares = counts.double() / counts.sum(dim=1, keepdim=True)
    mean = shares @ levels
    std = (shares * (levels - mean[:, None]) ** 2).sum(dim=1).sqrt()
    if not std.all():
        raise ValueError(f"a channel of the images is constant: standard deviations {std.tolist()}")
    return mean.float(), std.float()


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return uint8 images (B, C, S, S) as float32, each channel less its mean (C,), over its deviation (C,)."""
    mean, std = (255 * value.to(images.device)[:, None, None] for value in (mean, std))
    return (images - mean) / std


def augment(images: Tensor, numbers: Tensor, padding: int, flip: bool) -> Tensor:
    """Crop each image at random after padding, and mirror it as often as not: (B, C, S, S) -> the same shape.

    The paper crops with a padding of 4 at S = 32. The border is 0: the mean colour of images that are normalised, but
    black, as in torchvision's usual order, of uint8. Numbers (B, CROP) from U[0, 1) say row, column and whether to
    mirror.
    """
    batch, channels, side, _ = images.shape
    device = images.device
    padded = functional.pad(images, [padding] * 4)
    span = torch.arange(side, device=device)
    row, column, mirror = numbers.unsqueeze(2).unbind(1)  # (B, 1) each
    rows, columns = below(row, 2 * padding + 1) + span, below(column, 2 * padding + 1) + span  # (B, S) each
    if flip:
        columns = torch.where(mirror < 0.5, columns, columns.flip(1))
    image = torch.arange(batch, device=device)[:, None, None, None]
    channel = torch.arange(channels, device=device)[:, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


def grid(side: int, size: int) -> int:
    """Return how many patches of side `size` lie along an image's side.

    Raises:
        ValueError: they do not fill it.
    """
    if size < 1 or side % size:
        raise ValueError(f"patches of side {size} do not fill a side of {side} pixels")
    return side // size


def patches(images: Tensor, size: int) -> Tensor:
    """Cut images (B, C, S, S) into patches (B, N, C * size * size), row by row; in each its channels, row by row."""
    batch, channels, side, _ = images.shape
    along = grid(side, size)
    cut = images.reshape(batch, channels, along, size, along, size).permute(0, 2, 4, 1, 3, 5)
    return cut.reshape(batch, along * along, channels * size * size)


def focal(grid_size: int) -> tuple[int, ...]:
    """Return the central patches of a square grid: four where its side is even (27, 28, 35, 36 of 8x8), else one.

    They are the paper's Focal query; its Corner query is patch 0.

    Raises:
        ValueError: the grid has no patch.
    """
    if grid_size < 1:
        raise ValueError(f"a grid has at least one patch, got {grid_size}")
    centre = range((grid_size - 1) // 2, grid_size // 2 + 1)
    return tuple(row * grid_size + column for row in centre for column in centre)


def clutter(images: Tensor, others: Tensor, canvas: int, size: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Hide each image (B, C, S, S) whole on a canvas of patches of other images (M, C, S', S').

    It lies anywhere on the grid of patches of side `size`, each place as likely. Every other patch of the canvas is a
    patch of an image drawn from `others`, each as likely, which may be the image itself. So k/N is (S / canvas)^2.
    Numbers (B, `hiding`) from U[0, 1) say where it lies and what the patches are.

    Returns:
        canvases (B, C, T, T), T being `canvas`, and where the image lies: bool (B, N), N = (T / size)^2, row by row.

    Raises:
        ValueError: the canvas is smaller than the image, one of the sides is not filled by patches, or `others` differ
            from `images` in channels or type.
    """
    channels, side = images.shape[1:3]
    if (others.shape[1], others.dtype) != (channels, images.dtype):
        raise ValueError(
            f"others must be {images.dtype} of {channels} channels, got {others.dtype} {tuple(others.shape)}"
        )
    if canvas < side:
        raise ValueError(f"a canvas of side {canvas} cannot hold an image of side {side}")
    own, along = grid(side, size), grid(canvas, size)
    corner, image, place = numbers.split([2, along * along, along * along], dim=1)
    first = below(corner, along - own + 1).unsqueeze(2)  # row and column of its first patch (B, 2, 1)
    rows, columns = (first + torch.arange(own, device=images.device)).unbind(1)  # (B, S / size) each
    cells = (rows[:, :, None] * along + columns[:, None, :]).flatten(1)  # (B, k)
    tokens = _fragments(others, size, image, place)
    tokens = tokens.scatter(1, cells[:, :, None].expand(-1, -1, tokens.shape[2]), patches(images, size))
    signal = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=images.device).scatter(1, cells, True)
    pieces = tokens.unflatten(1, (along, along)).unflatten(3, (channels, size, size)).permute(0, 3, 1, 4, 2, 5)
    return pieces.reshape(-1, channels, canvas, canvas), signal


def hiding(canvas: int, size: int) -> int:
    """Return how many numbers hide an image on a canvas: two for its place, two for each patch."""
    return 2 + 2 * grid(canvas, size) ** 2


def _fragments(others: Tensor, size: int, image: Tensor, place: Tensor) -> Tensor:
    """Choose patches of images (M, C, S', S') by numbers (B, N) from U[0, 1) for each: (B, N, C * size * size)."""
    along = grid(others.shape[2], size)
    pieces = others.unfold(2, size, size).unfold(3, size, size)  # a view (M, C, S' / size, S' / size, size, size)
    place = below(place, along * along)
    return pieces[below(image, len(others)), :, place // along, place % along].flatten(2)


def _cifar(archive: Archive, data_dir: Path, download: bool) -> Images:
    """Read an archive's train and test records."""
    path = data_dir / archive.file
    packed = _read(path, CIFAR_URL + archive.file, archive.md5, download)
    members = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as tar:
            for member in tar:  # read into memory alone, wherever its name would put it; links are no data
                name = PurePosixPath(member.name).name
                file = tar.extractfile(member) if member.isfile() else None
                if file is not None and name in archive.train + archive.test:
                    if member.size > LARGEST:
                        raise ValueError(f"{path}: {name} promises {member.size} bytes, more than {LARGEST}")
                    members[name] = file.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is no whole archive: {error}") from error
    train, test = (_records(members, names, archive, path) for names in (archive.train, archive.test))
    return Images(*train, *test, num_classes=archive.num_classes, flip=True)


def _records(members: dict[str, bytes], names: tuple[str, ...], archive: Archive, path: Path) -> tuple[Tensor, Tensor]:
    """Return the images (M, 3, 32, 32) and labels (M,) of some members, whose records are labels, red, green, blue."""
    length = archive.label_bytes + 3 * 32 * 32
    for name in names:
        if name not in members:
            raise ValueError(f"{path} has no {name}")
        if not members[name] or len(members[name]) % length:
            raise ValueError(f"{path}: {name} has {len(members[name])} bytes, no whole number of {length}")
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
    """Return an idx file's array of bytes, and the path that it was found under.

    The format is at the foot of http://yann.lecun.com/exdb/mnist: 0, 0, 8 for bytes, the number of dimensions; each
    dimension, 4 bytes, the highest first; the array.
    """
    missing = data_dir / f"{name}.gz"
    places = [folder / file for folder in (data_dir, DEBIAN) for file in (name, missing.name)]
    path = next((place for place in places if place.is_file()), missing)
    data = _read(path, FASHION_URL + missing.name, FASHION[name], download)
    start, expected = 4 + 4 * dimensions, 0x800 + dimensions
    magic, *shape = struct.unpack(f">{1 + dimensions}I", data[:start].ljust(start, b"\0"))
    if magic != expected:
        raise ValueError(f"{path} begins with {magic:#x}, not with {expected:#x}: no bytes in {dimensions} dimensions")
    if len(data) != start + math.prod(shape):
        raise ValueError(f"{path} holds {len(data) - start} bytes after its header, not {math.prod(shape)} for {shape}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape), path


def _pair(pixels: np.ndarray, labels: np.ndarray, num_classes: int, path: Path) -> tuple[Tensor, Tensor]:
    """Copy images and their labels, as int64, to tensors; a wrong number or a label too high tells of the path."""
    if len(labels) != len(pixels):
        raise ValueError(f"{path} has {len(labels)} labels for {len(pixels)} images")
    if labels.max(initial=0) >= num_classes:
        raise ValueError(f"{path} has a label {labels.max()}, in {num_classes} classes from 0")
    return torch.from_numpy(pixels.copy()), torch.from_numpy(labels.astype(np.int64))


def _digits() -> Images:
    """Return scikit-learn's 1,797 digits, the levels 0..16 spread over 0..255; a fifth, 360, is the test set.

    They are shuffled once and for all, the same anywhere: in the file one writer's digits follow another's, and those
    of the last fifth are by people of whom the rest holds nothing.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the digits come with scikit-learn: pip install scikit-learn") from error
    digits = load_digits()
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(digits.target))
    pixels = torch.from_numpy(digits.images[order] * (255 / 16)).round().to(torch.uint8)[:, None]
    labels = torch.from_numpy(digits.target[order]).long()
    cut = len(pixels) * 4 // 5
    return Images(pixels[:cut], labels[:cut], pixels[cut:], labels[cut:], num_classes=10, flip=False)


def _read(path: Path, url: str, md5: str, download: bool) -> bytes:
    """Return the content of a file, or of what is fetched from its URL and then kept there; never of half a file."""
    found = path.is_file()
    if not found and not download:
        package = ", install Debian's package dataset-fashion-mnist" if url.startswith(FASHION_URL) else ""
        raise FileNotFoundError(f"{path} is missing: name its folder with --data-dir{package}, or fetch {url}")
    data = path.read_bytes() if found else _fetch(url, path)
    content = _unpack(data, path)
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if digest != md5:
        raise ValueError(f"{path if found else url} is incomplete or another file: its MD5 is {digest}, not {md5}")
    if not found:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    return content


def _unpack(data: bytes, path: Path) -> bytes:
    """Return what is in a .gz; a .tar.gz and all else stay as they are."""
    if path.suffixes != [".gz"]:
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            content = file.read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is incomplete or no gzip file: {error}") from error
    if len(content) > LARGEST:
        raise ValueError(f"{path} unpacks to more than {LARGEST} bytes: it is another file")
    return content


def _fetch(url: str, path: Path) -> bytes:
    """Return what a URL holds; where it does not answer, tell where to put the file, and the flag."""
    print(f"fetching {url}", file=sys.stderr)
    try:
        with _open(url) as response:
            return response.read()
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        advice = f"fetch it elsewhere and put it at {path}, or name its folder with --data-dir"
        raise ConnectionError(f"{url} could not be fetched ({str(error) or 'no answer'}); {advice}") from error


def _open(url: str) -> IO[bytes]:
    """Open a URL within PATIENCE, the look-up of its host included, for which urllib knows no limit."""
    answer: Future[IO[bytes]] = Future()

    def ask() -> None:
        try:
            answer.set_result(urllib.request.urlopen(url, timeout=PATIENCE))
        except Exception as error:  # raised again by whoever waits
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return answer.result(timeout=PATIENCE)
