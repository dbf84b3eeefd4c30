"""Which patches should a vision transformer pool? Six choices, on images of which the signal's share can be dialled.

    python supervised/vision.py                                                 # digits, a minute or two on a CPU
    python supervised/vision.py --dataset fashion-mnist --data-dir FOLDER       # minutes
    python supervised/vision.py --canvas 0 12 16 24                             # digits among fragments of other digits
    python supervised/vision.py --dataset cifar10 --preset paper --device cuda  # Section 4.5, appendix C.7

AdaPool's query is the mean of the central patches (focal), of all patches (mean), or the first patch (corner).
`--canvas` is not in the paper: it puts each image at a random place of a larger canvas among patches of other images,
so that the signal-to-noise ratio is (side / canvas)². The error is 1 − Top-1 accuracy. OUT gets `table.md`,
`results.json` and, with several canvases, `accuracy.png`; see `training.py` for what else it holds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import images
import report
import torch
import training
from chance import Chance
from network import HEADS, Network, Shape, ada
from torch import Tensor, nn
from torch.nn import functional as F

from noisy_envs.randomness import derive_seed

PATCH = {"cifar10": 4, "cifar100": 4, "fashion-mnist": 4, "digits": 2}
SHOWN = Chance(derive_seed(0, "clutter"))  # of pictures out of training
POOLS = ("clstoken", "avgpool", "maxpool", "adapool-focal", "adapool-mean", "adapool-corner")


@dataclass(kw_only=True)
class Args(training.Args):
    """Settings of the vision experiment; where others are not given, they depend on the data set and the preset."""

    preset: training.Preset = "fast"
    """where the other defaults come from: ours for a CPU, or the paper's"""
    dataset: str = "digits"
    """"digits", "fashion-mnist", "cifar10" or "cifar100\""""
    out: Path = Path("runs/vision")
    download: bool = False
    """whether to fetch a data set that is not in the data folder"""
    canvas: tuple[int, ...] = (0,)
    """sides of the canvas on which an image is hidden, in pixels; 0 for the image alone"""
    patch: int = 0
    """side of a patch in pixels; 0 for 4, or 2 for digits"""
    pools: tuple[str, ...] = POOLS
    seeds: tuple[int, ...] = (1,)
    folds: tuple[int, ...] = (1,)
    padding: int = 4
    """pixels by which images may be shifted in training"""
    epochs: int = 4
    batch_size: int = 128
    learning_rate: float = 3e-3
    layers: int = 2
    width: int = 64
    heads: int = 4
    feedforward: int = 128
    dropout: float = 0.1
    attention_scale: training.Scale = "head"
    init_std: float = 0.1
    attention_dropout: float = 0.0
    """share of the attention's weights that is dropped in training"""
    schedule: training.Schedule = "cosine"
    warmup: float = 0.1
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    jobs: int = 2


FAST: dict[str, dict[str, Any]] = {
    "digits": {"epochs": 100, "batch_size": 32, "padding": 0},
    "fashion-mnist": {"padding": 2, "epochs": 10},
    "cifar10": {"epochs": 20},
    "cifar100": {"epochs": 20},
}
PAPER: dict[str, Any] = {  # appendix "CIFAR Training Hyperparameters"
    "folds": (1, 2, 3, 4, 5), "epochs": 300, "batch_size": 512, "learning_rate": 1e-3, "layers": 6, "width": 512,
    "heads": 8, "feedforward": 64, "attention_dropout": 0.1, "attention_scale": "width", "init_std": 0.02, "jobs": 1,
}  # fmt: skip
PAPERS_ACCURACY = {  # Table 1
    "clstoken": {"cifar10": 84.52, "cifar100": 55.56},
    "avgpool": {"cifar10": 87.15, "cifar100": 59.63},
    "maxpool": {"cifar10": 87.65, "cifar100": 60.55},
    "adapool-focal": {"cifar10": 87.98, "cifar100": 61.22},
    "adapool-mean": {"cifar10": 87.84, "cifar100": 61.23},
    "adapool-corner": {"cifar10": 87.00, "cifar100": 57.08},
}


class PatchEmbedding(nn.Module):
    """Normalise, project and normalise patches (B, N, P), and add learned positions."""

    def __init__(self, num_patches: int, size: int, width: int) -> None:
        """Make layers for N patches of P = `size` numbers."""
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            self.layers = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, width), nn.LayerNorm(width))
            self.positions = nn.Embedding(num_patches, width)

    def forward(self, patches: Tensor) -> Tensor:
        """Return embeddings (B, N, H)."""
        x: Tensor = self.layers(patches)
        return x + self.positions.weight


class Vision:
    """Images to classify, in patches."""

    def __init__(self, args: Args, column: str) -> None:
        """Read the images: those to learn from, then those to test."""
        self.args = args
        self.data = images.load(args.dataset, args.data_dir, args.download)
        self.images = torch.cat([self.data.train, self.data.test]).to(args.device)
        self.labels = torch.cat([self.data.train_labels, self.data.test_labels]).to(args.device)
        self.num_samples, self.num_test = len(self.images), len(self.data.test)
        self.learned = self.images[: -self.num_test]
        self.mean, self.std = images.statistics(self.learned)
        self.side, self.patch = self.images.shape[2], args.patch or PATCH[args.dataset]
        self.canvas = canvas_of(column) or self.side
        if self.canvas < self.side:
            raise ValueError(f"canvas={self.canvas}: must be 0 for the image alone, or at least its side, {self.side}")
        if not 0 <= args.padding <= self.side:
            raise ValueError(f"padding={args.padding}: must be from 0 to {self.side}, the image's side")
        self.grid = images.grid(self.canvas, self.patch)
        self.crop = images.CROP if args.padding or self.data.flip else 0  # numbers that a picture needs, 0 for none
        self.hiding = images.hiding(self.canvas, self.patch) if self.canvas > self.side else 0
        self.shape = training.shape(args, args.attention_dropout, final_norm=True)
        self.shape.check()

    def network(self, pool: str, seed: int) -> Network:
        """Make the network with one of the heads."""
        embed = PatchEmbedding(self.grid**2, self.images.shape[1] * self.patch**2, self.shape.width)
        with torch.random.fork_rng(devices=[]):
            output = nn.Linear(self.shape.width, self.data.num_classes)
        return Network(self.shape, embed, head(pool, self.grid), output, seed)

    def draw(self, index: Tensor, chance: Chance) -> Tensor:
        """Return the numbers (B, ...) that crop images and hide them."""
        return torch.cat(chance.draw(index, (self.crop, self.hiding)), dim=1)

    def batch(self, index: Tensor, numbers: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return patches (B, N, P) and labels (B,); in training cropped and, where labels allow it, mirrored.

        Out of training a canvas follows from the image's index alone, for all heads and seeds.
        """
        counts = 0 if numbers is None else self.crop, self.hiding
        crop, hide = SHOWN.draw(index, counts) if numbers is None else numbers.split(counts, dim=1)
        found = self.images[index]
        if counts[0]:
            found = images.augment(found, crop, self.args.padding, self.data.flip)
        if counts[1]:
            found, _ = images.clutter(found, self.learned, self.canvas, self.patch, hide)
        return images.patches(images.normalise(found, self.mean, self.std), self.patch), self.labels[index]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return F.cross_entropy(outputs, targets)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return 1 for each wrong answer (B,)."""
        return (outputs.argmax(dim=1) != targets).float()


def head(pool: str, grid: int) -> Callable[[Shape, torch.Generator], Any]:
    """Return the maker of a head for a square grid of patches."""
    queries: dict[str, int | tuple[int, ...] | str] = {"focal": images.focal(grid), "mean": "mean", "corner": 0}
    name, _, query = pool.partition("-")
    return ada(queries[query]) if query else HEADS[name]


def column_of(dataset: str, canvas: int) -> str:
    """Name a data set on a canvas."""
    return f"{dataset} on {canvas}" if canvas else dataset


def canvas_of(column: str) -> int:
    """Return the side of a column's canvas, 0 for none."""
    return int(column.partition(" on ")[2] or 0)


def main(argv: Sequence[str]) -> None:
    """Run what is missing; write the table, and the figure of several canvases."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--dataset", choices=images.NAMES, default="digits")
    fast = FAST[first.parse_known_args(argv)[0].dataset]
    args = training.parse(Args, argv, {"fast": fast, "paper": PAPER}, __doc__)
    training.check(args, POOLS)
    columns = [column_of(args.dataset, canvas) for canvas in sorted(set(args.canvas))]
    if not columns:
        raise ValueError("canvas: must be at least one side, 0 for the image alone")
    side = max(Vision(args, column).side for column in columns)  # which also checks what it needs
    found = training.run_all(args, columns, Vision)
    rows = report.scores(found, lambda error: 100 * (1 - error))
    paper = PAPERS_ACCURACY if args.dataset in PAPERS_ACCURACY["avgpool"] else {}
    text = report.table(rows, {}, paper, columns, digits=2)
    report.write(args, "vision.py", f"Top-1 accuracy in percent, {args.dataset}", text, found)
    if len(columns) > 1:
        ratios = {column: (side / (canvas_of(column) or side)) ** 2 for column in columns}
        labels = ("signal-to-noise ratio (side / canvas)²", "Top-1 accuracy, %")
        report.plot_lines(args.out / "accuracy.png", rows, {}, {}, ratios, labels, log=False)
    print(f"{text}\nsee table.md and results.json in {args.out}")


if __name__ == "__main__":
    training.guard(main, sys.argv[1:])
