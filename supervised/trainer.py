"""How one supervised run is trained: folds, epochs, learning rate, validation. `experiment.py` starts and saves runs.

Each of five folds validates one contiguous fifth of the samples that are not for testing, and trains on the rest.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from chance import Chance
from network import Network
from torch import Tensor, nn

from noisy_envs.nn.cuda_graph import CudaGraph
from noisy_envs.randomness import derive_seed

if TYPE_CHECKING:
    from experiment import Args

NUM_FOLDS = 5
EVAL_BATCH_SIZE = 2000
BATCHES_AHEAD = 32  # for which random numbers are drawn at a time


class Split(NamedTuple):
    """Indices of the samples of each part."""

    train: Tensor
    validation: Tensor
    test: Tensor


class Task(Protocol):
    """A supervised task. Its first samples are for training and validation, the last `num_test` for testing."""

    num_samples: int
    num_test: int

    def network(self, pooling: str, seed: int) -> Network:
        """Make the network with one of the pooling heads."""

    def draw(self, index: Tensor, chance: Chance) -> Tensor:
        """Return the random numbers (B, ...) that augment samples (B,) in training, for any batch."""

    def batch(self, index: Tensor, numbers: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of samples (B,); in training, `numbers` augment them."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss."""

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the reported error of each sample (B,)."""


def split(task: Task, fold: int) -> Split:
    """Return the samples of a fold, on the CPU."""
    learned = task.num_samples - task.num_test
    if learned < NUM_FOLDS or task.num_test < 1:
        raise ValueError(
            f"{learned} samples for training and {task.num_test} for testing: expected at least {NUM_FOLDS} and 1"
        )
    low, high = (learned * part // NUM_FOLDS for part in (fold - 1, fold))
    index = torch.arange(task.num_samples)
    return Split(torch.cat([index[:low], index[high:learned]]), index[low:high], index[learned:])


def learning_rate(args: Args, step: int, steps: int) -> float:
    """Return the learning rate of a step, of 0 … steps − 1."""
    rising = args.warmup * steps
    if step < rising:
        return args.learning_rate * (step + 1) / math.ceil(rising)
    if args.schedule == "constant":
        return args.learning_rate
    return args.learning_rate * (1 + math.cos(math.pi * (step - rising) / (steps - rising))) / 2


@dataclass
class Run:
    """Training state of a run."""

    network: Network
    optimizer: torch.optim.Optimizer
    rows: list[dict[str, float]] = field(default_factory=list)  # of `metrics.csv`, one per epoch
    best: dict[str, Tensor] = field(default_factory=dict)  # weights of the best epoch


Gradient = Callable[[Tensor, Tensor], tuple[Tensor, tuple[Tensor, ...]]]


def make_gradient(task: Task, network: Network) -> Gradient:
    """Return a function of inputs and targets: the loss, and its gradients with respect to the parameters."""
    parameters = list(network.parameters())

    def gradient(inputs: Tensor, targets: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        loss = task.loss(network(inputs), targets)
        return loss.detach(), torch.autograd.grad(loss, parameters)

    return gradient


class Trainer:
    """Trains a network, one epoch at a time."""

    def __init__(self, task: Task, run: Run, args: Args, seed: int) -> None:
        """Compile the network if requested."""
        self.task, self.run, self.args, self.seed = task, run, args, seed
        self.parameters = list(run.network.parameters())
        self.gradient = make_gradient(task, run.network)
        self.recorded: Gradient = self.gradient
        if args.compile:
            run.network.compile_layers(args.max_autotune)
        if args.compile and torch.device(args.device).type == "cuda":
            self.recorded = CudaGraph(self.gradient)

    def epoch(self, index: Tensor) -> float:
        """Train on all samples once, in an order that follows from seed and epoch; return the mean loss."""
        args, number = self.args, len(self.run.rows)
        order_seed, dropout_seed = (
            derive_seed(self.seed, f"{purpose} of epoch {number}") for purpose in ("order", "dropout")
        )  # two seeds: generators with the same seed would draw the same numbers
        order = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(order_seed))].to(args.device)
        chance = Chance(derive_seed(self.seed, "batch"), number)
        steps = math.ceil(len(order) / args.batch_size)
        self.run.network.train()
        total = torch.zeros((), device=args.device)
        with random_state(args.device):  # dropout draws from the global state: seeded here, restored after
            torch.manual_seed(dropout_seed)
            for step, (batch, numbers) in enumerate(self.batches(order, chance), start=number * steps):
                total += len(batch) * self.step(batch, numbers, learning_rate(args, step, args.epochs * steps))
        return total.item() / len(index)

    def batches(self, order: Tensor, chance: Chance) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the samples of each batch and their random numbers.

        They are drawn for many batches at once, because one draw launches many small kernels on a GPU.
        """
        size = self.args.batch_size
        for part in order.split(BATCHES_AHEAD * size):
            yield from zip(part.split(size), self.task.draw(part, chance).split(size), strict=True)

    def step(self, index: Tensor, numbers: Tensor, rate: float) -> Tensor:
        """Take an optimizer step on a batch; return the mean loss before it."""
        # a recorded graph has a fixed batch size
        gradient = self.recorded if len(index) == self.args.batch_size else self.gradient
        loss, gradients = gradient(*self.task.batch(index, numbers))
        for parameter, grad in zip(self.parameters, gradients, strict=True):
            parameter.grad = grad
        if self.args.max_grad_norm < math.inf:
            nn.utils.clip_grad_norm_(self.parameters, self.args.max_grad_norm)
        for group in self.run.optimizer.param_groups:
            group["lr"] = rate
        self.run.optimizer.step()
        return loss


def random_state(device: str) -> AbstractContextManager[None]:
    """Return a context that restores the global random state, including the device's."""
    index = torch.zeros((), device=device).get_device()
    return torch.random.fork_rng(devices=[index] if index >= 0 else [])


@torch.no_grad()
def mean_error(task: Task, network: Network, index: Tensor, device: str) -> float:
    """Return the mean error of samples."""
    network.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for batch in index.to(device).split(EVAL_BATCH_SIZE):
        inputs, targets = task.batch(batch, None)
        total += task.error(network(inputs), targets).sum()
    return total.item() / len(index)


def train_epoch(trainer: Trainer, parts: Split) -> dict[str, float]:
    """Train an epoch and validate; return the row of `metrics.csv`."""
    run, device = trainer.run, trainer.args.device
    start = time.perf_counter()
    loss = trainer.epoch(parts.train)
    trained = time.perf_counter()
    error = mean_error(trainer.task, run.network, parts.validation, device)
    return {
        "epoch": len(run.rows) + 1,
        "train_loss": loss,
        "validation_error": error,
        "learning_rate": run.optimizer.param_groups[0]["lr"],
        "seconds": trained - start,
        "validation_seconds": time.perf_counter() - trained,
    }
