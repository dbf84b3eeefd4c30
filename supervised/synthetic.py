"""The paper's synthetic data set (Section 4.1, appendix "Synthetic Dataset Construction Parameters"), and its targets.

A set has N vectors of D features. Each feature has its own distribution. A third of the features each are normal,
exponential and uniform, any remaining ones are of a random kind, and their order is shuffled. All values are divided by
sqrt(D). The paper's "rate" of the exponential distribution is taken as its mean, like NumPy's `scale`: only then do the
paper's naive baselines come out.

A set depends only on the seed and its number, see `chance`; devices differ only by rounding. Shapes: `B` sets, `N`
vectors, the target first, `D` features.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from chance import Chance, below
from torch import Tensor
from torch.nn import functional

from noisy_envs.randomness import STREAM
from noisy_envs.training.files import replacing
from noisy_envs.validation import check_count

BLOCK, GPU_BLOCK = 512, 4096  # sets drawn at a time; on a CPU the intermediate results of one block fit in the caches
VERSION = 2  # of the values, part of the file name
KINDS = 3  # normal, exponential, uniform


class Sets(NamedTuple):
    """Sizes and seed of a data set."""

    num_sets: int = 1_000_000
    num_vectors: int = 128
    num_features: int = 16
    seed: int = 42

    @property
    def file_name(self) -> str:
        """Return the name of the data set's file."""
        return f"sets-v{VERSION}-seed{self.seed}-{self.num_sets}x{self.num_vectors}x{self.num_features}.npy"

    def check(self) -> None:
        """Raise ValueError if a number is out of range, naming it."""
        for name, minimum in (("num_sets", 1), ("num_features", 1), ("seed", 0)):
            check_count(name, getattr(self, name), minimum, may_be_range=False)
        check_count("num_vectors", self.num_vectors, 2, may_be_range=False, maximum=STREAM // self.num_features)


def draw(sets: Sets, items: Tensor) -> Tensor:
    """Draw sets (B, N, D), float32, by their numbers (B,), int64, on the same device."""
    n, d = sets.num_vectors, sets.num_features
    each, rest = divmod(d, KINDS)
    counts = (d, d, d, d, rest, n * each, n * each, n * each, n * rest)
    start, sign, width, order, extra, *numbers = Chance(sets.seed).draw(items, counts)
    kinds = torch.arange(KINDS, device=items.device).repeat_interleave(each).expand(len(items), -1)
    kinds = torch.cat([kinds, below(extra, KINDS)], dim=1)[:, None]  # (B, 1, D)
    normal, exponential, flat, left = (x.unflatten(1, (n, x.shape[1] // n)) for x in numbers)
    kind = kinds[..., KINDS * each :]
    left = torch.where(kind == 0, _normal(left.clone()), torch.where(kind == 1, _exponential(left.clone()), left))
    values = torch.cat([_normal(normal), _exponential(exponential), flat, left], dim=2)

    start, width, sign = start[:, None], width[:, None], 1 - 2 * below(sign[:, None], 2)  # (B, 1, D) each
    widths = torch.stack([1 + 2 * width, sign * (0.1 + 1.9 * width), 0.2 + 2.8 * width])
    starts = torch.stack([6 * start - 3, -3 * sign * start, 6 * start - 3])
    width, start = (x.gather(0, kinds[None])[0] / math.sqrt(d) for x in (widths, starts))
    place = order[:, None].argsort(dim=2, stable=True)
    return torch.addcmul(start, values, width).gather(2, place.expand(-1, n, -1))


def _normal(numbers: Tensor) -> Tensor:
    """Transform numbers from U[0, 1), of 24 bits, in place to Normal(0, 1), within ±5.4."""
    return numbers.mul_(2).sub_(1 - 2**-24).erfinv_().mul_(math.sqrt(2))


def _exponential(numbers: Tensor) -> Tensor:
    """Transform numbers from U[0, 1) in place to Exponential(1)."""
    return numbers.neg_().log1p_().neg_()


def draw_sets(sets: Sets, device: str = "cpu") -> Tensor:
    """Draw all sets (num_sets, N, D) on a device."""
    sets.check()
    items = torch.arange(sets.num_sets, device=device)
    block = BLOCK if items.device.type == "cpu" else GPU_BLOCK
    values = torch.empty(sets[:3], device=device)
    for part, numbers in zip(values.split(block), items.split(block), strict=True):
        part.copy_(draw(sets, numbers))
    return values


def load_sets(sets: Sets, folder: Path, workers: int = 2) -> Tensor:
    """Return all sets (num_sets, N, D) from a memory-mapped file in `folder`; the first call writes the file.

    Raises:
        ValueError: `sets` or `workers` is out of range, or the file has other content.
        OSError: the file cannot be written.
    """
    sets.check()
    if workers < 1:
        raise ValueError(f"workers={workers}: expected at least 1")
    path = folder / sets.file_name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write(sets, path, workers)
    try:
        with np.errstate(over="raise"):  # the product of the sizes in a crafted header
            values = np.lib.format.open_memmap(path, mode="c")  # changes stay in memory
    except (ValueError, EOFError, ArithmeticError) as error:
        raise ValueError(f"{path} is not a file of sets ({error}): delete it, and it will be written again") from None
    if values.shape != sets[:3] or values.dtype != np.float32:
        raise ValueError(f"{path} holds {values.dtype} {values.shape}, expected float32 {sets[:3]}: delete it")
    return torch.from_numpy(values)


def _write(sets: Sets, path: Path, workers: int) -> None:
    """Write the file; `_fill` closes its map, because Windows renames no open or mapped file."""
    with replacing(path) as part:
        _fill(sets, part, workers)


def _fill(sets: Sets, path: Path, workers: int) -> None:
    """Draw blocks in threads, each into its own part of the file; torch releases the interpreter lock meanwhile."""
    values = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=sets[:3])
    if hasattr(os, "posix_fallocate"):  # a full disk raises an error here; later it would kill the process
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)

    def fill(items: Tensor) -> None:
        values[items[0] : items[-1] + 1] = draw(sets, items).numpy()

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(fill, torch.arange(sets.num_sets).split(BLOCK)))
    values.flush()


def nearest(sets: Tensor, k: int) -> Tensor:
    """Return the shares (B, N) of vectors among the k nearest neighbors of the first one, for sets (B, N, D).

    Vectors nearer than the k-th have the share 1, those farther away 0. Vectors as far away as the k-th share the rest
    of k equally, so that the order of vectors does not matter. With k = N all N - 1 others have the share 1. The first
    vector itself is excluded, its duplicates are not.

    Raises:
        ValueError: k is not from 1 to N.
    """
    num_vectors = sets.shape[1]
    if not 1 <= k <= num_vectors:
        raise ValueError(f"k={k}: expected a number from 1 to {num_vectors}, the vectors of a set")
    k = min(k, num_vectors - 1)
    distances = (sets[:, 1:] - sets[:, :1]).square().sum(dim=2)  # (B, N - 1)
    farthest = distances.topk(k, dim=1, largest=False, sorted=False).values.amax(dim=1, keepdim=True)
    nearer, tied = distances < farthest, distances == farthest
    left = (k - nearer.sum(dim=1, keepdim=True)).to(sets.dtype)
    return functional.pad(nearer + tied * left / tied.sum(dim=1, keepdim=True), (1, 0))


def centroids(sets: Tensor, k: int, batch: int = 1000) -> Tensor:
    """Return the means (B, D) of the k nearest neighbors of the first vectors, for sets (B, N, D).

    Vectors that tie for the last place count in part, see `nearest`.
    """
    means = []
    for part in sets.split(batch):
        shares = nearest(part, k)
        means.append((shares.unsqueeze(2) * part).sum(dim=1) / shares.sum(dim=1, keepdim=True))
    return torch.cat(means)
