"""The paper's synthetic data set (Section 4.1, appendix "Synthetic Dataset Construction Parameters"), and its targets.

A set is N vectors of d features. Each feature, a column, has a distribution of its own: as many columns normal,
exponential and uniform, what is left over of a random kind, in shuffled order. All is divided by sqrt(d). The rate of
the exponential is its mean, as NumPy's `scale`: only so do the paper's naive baselines come out.

Sets come in blocks of 1,000, each drawn by a generator that is seeded with the seed and the block's number: the values
depend on nothing else but the kind of device. `B` sets, `N` vectors, `D` features, the target vector first.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from noisy_envs.files import replacing

BLOCK = 1000  # sets drawn by one generator
VERSION = 1  # of the values; part of the file's name
KINDS = 3  # normal, exponential, uniform


class Sets(NamedTuple):
    """What a data set depends on."""

    num_sets: int = 1_000_000
    num_vectors: int = 128
    num_features: int = 16
    seed: int = 42

    @property
    def file_name(self) -> str:
        """Name the file that holds it."""
        return f"sets-v{VERSION}-seed{self.seed}-{self.num_sets}x{self.num_vectors}x{self.num_features}.npy"

    def check(self) -> None:
        """Raise ValueError, naming a number that is too small."""
        for name, least in (("num_sets", 1), ("num_vectors", 2), ("num_features", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")


def draw_block(sets: Sets, block: int, device: str = "cpu") -> Tensor:
    """Draw the sets of one block (BLOCK, N, D), float32."""
    seed = int(np.random.SeedSequence([sets.seed, block]).generate_state(1, np.uint64)[0] >> 1)
    generator = torch.Generator(device).manual_seed(seed)
    n, d = sets.num_vectors, sets.num_features

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(BLOCK, *shape, device=device).uniform_(low, high, generator=generator)

    each, rest = divmod(d, KINDS)
    kinds = torch.arange(KINDS, device=device).repeat_interleave(each).expand(BLOCK, -1)
    extra = torch.randint(KINDS, (BLOCK, rest), generator=generator, device=device)
    kinds = torch.cat([kinds, extra], dim=1)[:, None]  # (BLOCK, 1, D)
    values = torch.empty(BLOCK, n, d, device=device)
    # a column of a kind known beforehand is drawn once, those left over in all three ways, of which one is taken
    normal = torch.empty(BLOCK, n, each + rest, device=device).normal_(generator=generator)
    exponential = uniform(0, 1, n, each + rest).neg_().log1p_().neg_()
    flat = uniform(0, 1, n, each + rest)
    for kind, drawn in enumerate((normal, exponential, flat)):
        values[..., kind * each : (kind + 1) * each] = drawn[..., :each]
    left = torch.where(kinds[..., KINDS * each :] == 1, exponential[..., each:], flat[..., each:])
    values[..., KINDS * each :] = torch.where(kinds[..., KINDS * each :] == 0, normal[..., each:], left)

    start, sign = uniform(-3, 3, 1, d), uniform(0, 1, 1, d).round().mul_(2).sub_(1)
    widths = torch.stack([uniform(1, 3, 1, d), sign * uniform(0.1, 2, 1, d), uniform(0.2, 3, 1, d)])
    starts = torch.stack([start, -sign * uniform(0, 3, 1, d), start])
    width, start = (x.gather(0, kinds[None])[0] / math.sqrt(d) for x in (widths, starts))
    order = uniform(0, 1, 1, d).argsort(dim=2)
    return torch.addcmul(start, values, width).gather(2, order.expand(-1, n, -1))


def draw_sets(sets: Sets, device: str = "cpu") -> Tensor:
    """Draw all sets (num_sets, N, D) into the memory of a device."""
    sets.check()
    values = torch.empty(sets.num_sets, sets.num_vectors, sets.num_features, device=device)
    for block, part in enumerate(values.split(BLOCK)):
        part.copy_(draw_block(sets, block, device)[: len(part)])
    return values


def load_sets(sets: Sets, folder: Path, workers: int = 2) -> Tensor:
    """Return all sets (num_sets, N, D) from a file in `folder`, mapped to memory; the first call writes it.

    Raises:
        ValueError: `sets` or `workers` is out of range, or a file of that name holds something else.
        OSError: the file can not be written.
    """
    sets.check()
    if workers < 1:
        raise ValueError(f"workers={workers}: must be at least 1")
    path = folder / sets.file_name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write(sets, path, workers)
    try:
        with np.errstate(over="raise"):  # of sizes, which NumPy multiplies
            values = np.lib.format.open_memmap(path, mode="c")  # changes would not reach the file
    except (ValueError, EOFError, ArithmeticError) as error:
        raise ValueError(f"{path} is no file of sets ({error}): delete it, and it is written again") from None
    if values.shape != sets[:3] or values.dtype != np.float32:
        raise ValueError(f"{path} holds {values.dtype} {values.shape}, not float32 {sets[:3]}: delete it")
    return torch.from_numpy(values)


def _write(sets: Sets, path: Path, workers: int) -> None:
    """Make the file; Windows renames none that is open or mapped."""
    with replacing(path) as part:
        _fill(sets, part, workers)


def _fill(sets: Sets, path: Path, workers: int) -> None:
    """Draw blocks in threads (torch holds no lock while it draws), each into its own part of the file."""
    values = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=sets[:3])
    if hasattr(os, "posix_fallocate"):  # a full disk is an error here, and would end the process later
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)

    def fill(block: int) -> None:
        drawn = values[block * BLOCK : (block + 1) * BLOCK]
        drawn[:] = draw_block(sets, block)[: len(drawn)].numpy()

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(fill, range(-(-sets.num_sets // BLOCK))))
    values.flush()


def nearest(sets: Tensor, k: int) -> Tensor:
    """Return which vectors are the k nearest to the first, itself excluded, of sets (B, N, D): indices (B, k).

    With k = N all N - 1 others. The first is left out by its place, so its duplicates are neighbours.

    Raises:
        ValueError: k is not from 1 to N.
    """
    num_vectors = sets.shape[1]
    if not 1 <= k <= num_vectors:
        raise ValueError(f"k={k}: must be from 1 to {num_vectors}, the vectors of a set")
    distances = (sets[:, 1:] - sets[:, :1]).square().sum(dim=2)  # (B, N - 1)
    return 1 + distances.topk(min(k, num_vectors - 1), dim=1, largest=False, sorted=False).indices


def centroids(sets: Tensor, k: int, batch: int = 10_000) -> Tensor:
    """Return the means (B, D) of the k nearest to the first vector, of sets (B, N, D), a batch at a time."""
    found = []
    for some in sets.split(batch):
        index = nearest(some, k).unsqueeze(2).expand(-1, -1, some.shape[2])
        found.append(some.gather(1, index).mean(dim=1))
    return torch.cat(found)
