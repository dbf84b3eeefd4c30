"""How should a vision transformer pool its patches? Six answers, on images with an adjustable share of signal.

    python supervised/vision.py                                                 # digits, a minute or two on a CPU
    python supervised/vision.py --dataset fashion-mnist --data-dir FOLDER       # minutes
    python supervised/vision.py --canvas-size 0 12 16 24                        # digits among fragments of other digits
    python supervised/vision.py --dataset cifar10 --preset paper --device cuda  # Section 4.5, appendix C.7

AdaPool's query is the mean of the central patches (focal), the mean of all patches (mean), or the first patch (corner).
`--canvas-size` is not in the paper: it places each image at random on a larger canvas among patches of other images.
The signal-to-noise ratio is then (image size / canvas size)². The error is 1 − Top-1 accuracy. OUT gets `table.md`,
`results.json` and, with several canvas sizes, `accuracy.png`; `experiment.py` describes its other files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import experiment
import images
import report
import torch
from chance import Chance
from network import POOLING, MakeHead, Network, adapool
from torch import Tensor, nn
from torch.nn import functional as F

from noisy_envs.randomness import derive_seed

PATCH_SIZE = {"cifar10": 4, "cifar100": 4, "fashion-mnist": 4, "digits": 2}
EVAL_CHANCE = Chance(derive_seed(0, "clutter"))  # of the canvases in validation and test
POOLING_NAMES = ("clstoken", "avgpool", "maxpool", "adapool-focal", "adapool-mean", "adapool-corner")


@dataclass(kw_only=True)
class Args(experiment.Args):
    """Settings of the vision experiment; the other defaults depend on the data set and the preset."""

    preset: experiment.Preset = "fast"
    """defaults of all other settings: fast on a CPU, or the paper's"""
    dataset: str = "digits"
    """"digits", "fashion-mnist", "cifar10" or "cifar100\""""
    out: Path = Path("runs/vision")
    download: bool = False
    """download the data set if it is not in the data folder"""
    canvas_size: tuple[int, ...] = (0,)
    """sizes of the square canvas that hides an image, in pixels; 0 for the image alone"""
    patch_size: int = 0
    """size of a square patch in pixels; 0 for 4, or 2 for digits"""
    pooling: tuple[str, ...] = POOLING_NAMES
    seeds: tuple[int, ...] = (1,)
    folds: tuple[int, ...] = (1,)
    padding: int = 4
    """maximum shift of training images, in pixels"""
    epochs: int = 4
    batch_size: int = 128
    learning_rate: float = 3e-3
    num_layers: int = 2
    embed_dim: int = 64
    num_heads: int = 4
    feedforward_dim: int = 128
    dropout: float = 0.1
    attention_scale: experiment.AttentionScale = "head"
    init_std: float = 0.1
    attention_dropout: float = 0.0
    """dropout probability of the attention weights"""
    schedule: experiment.Schedule = "cosine"
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
    "folds": (1, 2, 3, 4, 5), "epochs": 300, "batch_size": 512, "learning_rate": 1e-3, "num_layers": 6,
    "embed_dim": 512, "num_heads": 8, "feedforward_dim": 64, "attention_dropout": 0.1, "attention_scale": "embed",
    "init_std": 0.02, "jobs": 1,
}  # fmt: skip
PAPER_ACCURACY = {  # Table 1
    "clstoken": {"cifar10": 84.52, "cifar100": 55.56},
    "avgpool": {"cifar10": 87.15, "cifar100": 59.63},
    "maxpool": {"cifar10": 87.65, "cifar100": 60.55},
    "adapool-focal": {"cifar10": 87.98, "cifar100": 61.22},
    "adapool-mean": {"cifar10": 87.84, "cifar100": 61.23},
    "adapool-corner": {"cifar10": 87.00, "cifar100": 57.08},
}


class PatchEmbedding(nn.Module):
    """Normalize and project patches (B, N, P), normalize again, and add learned positions."""

    def __init__(self, num_patches: int, num_features: int, embed_dim: int) -> None:
        """Make the layers for N patches of P = `num_features` numbers."""
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            self.layers = nn.Sequential(
                nn.LayerNorm(num_features), nn.Linear(num_features, embed_dim), nn.LayerNorm(embed_dim)
            )
            self.positions = nn.Embedding(num_patches, embed_dim)

    def forward(self, patches: Tensor) -> Tensor:
        """Return embeddings (B, N, H)."""
        x: Tensor = self.layers(patches)
        return x + self.positions.weight


class Vision:
    """The task of classifying images, cut into patches."""

    def __init__(self, args: Args, column: str) -> None:
        """Load the images: first those for training, then those for testing."""
        self.args = args
        self.data = images.load(args.dataset, args.data_dir, args.download)
        self.images = torch.cat([self.data.train, self.data.test]).to(args.device)
        self.labels = torch.cat([self.data.train_labels, self.data.test_labels]).to(args.device)
        self.num_samples, self.num_test = len(self.images), len(self.data.test)
        self.learned = self.images[: -self.num_test]
        self.mean, self.std = images.channel_statistics(self.learned)
        self.size, self.patch_size = self.images.shape[2], args.patch_size or PATCH_SIZE[args.dataset]
        self.canvas_size = column_canvas(column) or self.size
        if self.canvas_size < self.size:
            raise ValueError(f"canvas_size={self.canvas_size}: expected 0, or at least {self.size}, the image size")
        if not 0 <= args.padding <= self.size:
            raise ValueError(f"padding={args.padding}: expected a number from 0 to {self.size}, the image size")
        self.grid_size = images.patches_per_side(self.canvas_size, self.patch_size)
        # random numbers per image to crop it, and to hide it on a canvas
        self.num_crop = images.NUM_CROP if args.padding or self.data.flip else 0
        self.num_hide = images.num_hide(self.canvas_size, self.patch_size) if self.canvas_size > self.size else 0
        self.config = experiment.encoder_config(args, args.attention_dropout, final_norm=True)
        self.config.check()

    def network(self, pooling: str, seed: int) -> Network:
        """Make the network with one of the pooling heads."""
        num_features = self.images.shape[1] * self.patch_size**2
        embed = PatchEmbedding(self.grid_size**2, num_features, self.config.embed_dim)
        with torch.random.fork_rng(devices=[]):
            output = nn.Linear(self.config.embed_dim, self.data.num_classes)
        return Network(self.config, embed, make_head(pooling, self.grid_size), output, seed)

    def draw(self, index: Tensor, chance: Chance) -> Tensor:
        """Return the random numbers (B, ...) that crop images and hide them on canvases."""
        return torch.cat(chance.draw(index, (self.num_crop, self.num_hide)), dim=1)

    def batch(self, index: Tensor, numbers: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return patches (B, N, P) and labels (B,); training crops images and, if labels allow it, mirrors them.

        In validation and test the canvas depends only on the image, so that all heads and seeds see the same.
        """
        counts = 0 if numbers is None else self.num_crop, self.num_hide
        crop, hide = EVAL_CHANCE.draw(index, counts) if numbers is None else numbers.split(counts, dim=1)
        batch = self.images[index]
        if counts[0]:
            batch = images.augment(batch, crop, self.args.padding, self.data.flip)
        if counts[1]:
            batch, _ = images.clutter(batch, self.learned, self.canvas_size, self.patch_size, hide)
        return images.patches(images.normalize(batch, self.mean, self.std), self.patch_size), self.labels[index]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return F.cross_entropy(outputs, targets)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return 1 for each wrong answer (B,)."""
        return (outputs.argmax(dim=1) != targets).float()


def make_head(pooling: str, grid_size: int) -> MakeHead:
    """Return the maker of a pooling head for a square grid of patches."""
    queries: dict[str, int | tuple[int, ...] | str] = {
        "focal": images.focal_patches(grid_size), "mean": "mean", "corner": 0,
    }  # fmt: skip
    name, _, query = pooling.partition("-")
    return adapool(queries[query]) if query else POOLING[name]


def column_name(dataset: str, canvas_size: int) -> str:
    """Name the column of a data set on a canvas."""
    return f"{dataset} on {canvas_size}" if canvas_size else dataset


def column_canvas(column: str) -> int:
    """Return the canvas size of a column, 0 for none."""
    return int(column.partition(" on ")[2] or 0)


def main(argv: Sequence[str]) -> None:
    """Run what is missing; write the table and, for several canvas sizes, the figure."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dataset", choices=images.NAMES, default="digits")
    fast = FAST[parser.parse_known_args(argv)[0].dataset]
    args = experiment.parse(Args, argv, {"fast": fast, "paper": PAPER}, __doc__)
    experiment.check(args, POOLING_NAMES)
    experiment.check_not_empty(args, "canvas_size")
    columns = [column_name(args.dataset, canvas_size) for canvas_size in sorted(set(args.canvas_size))]
    size = max(Vision(args, column).size for column in columns)  # making the tasks also checks their settings
    summaries = experiment.run_all(args, columns, Vision)
    rows = report.scores(summaries, lambda error: 100 * (1 - error))
    paper = PAPER_ACCURACY if args.dataset in PAPER_ACCURACY["avgpool"] else {}
    text = report.format_table(rows, {}, paper, columns, digits=2)
    report.write(args, "vision.py", f"Top-1 accuracy in percent, {args.dataset}", text, summaries)
    if len(columns) > 1:
        ratios = {column: (size / (column_canvas(column) or size)) ** 2 for column in columns}
        labels = ("signal-to-noise ratio (image size / canvas size)²", "Top-1 accuracy, %")
        report.plot_lines(args.out / "accuracy.png", rows, {}, {}, ratios, labels, log=False)
    print(f"{text}\nsee table.md and results.json in {args.out}")


if __name__ == "__main__":
    experiment.guard(main, sys.argv[1:])
