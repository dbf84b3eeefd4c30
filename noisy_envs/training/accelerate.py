"""What makes learning fast without changing it: pieces of a batch, compilation, CUDA graphs.

`M` samples.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from noisy_envs.nn.cuda_graph import CudaGraph
from noisy_envs.training.distributed import WORLD_SIZE, average_gradient

CPU_PIECE = 1024  # samples whose activations fit a CPU's caches
Samples = TypeVar("Samples", bound=tuple[Tensor, ...])
Function = TypeVar("Function", bound=Callable[..., Any])
Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]
Gradient = Callable[..., dict[str, Tensor]]


class Accelerator:
    """Compiles and records the functions of a run, if its settings ask for it; else it returns them as they are."""

    def __init__(self, compile: bool, record: bool, device: str) -> None:
        """Choose what to do: `record` is whether functions on a GPU become CUDA graphs."""
        self._compile, self._record = compile, record and WORLD_SIZE == 1
        # A GPU sums over few tokens fastest without dividing them among threads.
        self._options: Any = {"unroll_reductions_threshold": 64} if torch.device(device).type == "cuda" else None
        if compile and "torch._dynamo" in sys.modules:  # which takes seconds to import
            torch.compiler.reset()  # functions of another run in this process would count as variants of these

    def compile(self, function: Function) -> Function:
        """Compile a function of tensors."""
        if not self._compile:
            return function
        compiled: Any = torch.compile(function, fullgraph=True, dynamic=False, options=self._options)
        return compiled

    def record(self, function: Function) -> Function:
        """Record a function without gradients as a CUDA graph: each call overwrites what the last one returned."""
        plain: Any = torch.no_grad()(function)
        recorded: Any = CudaGraph(plain) if self._record else plain
        return recorded

    def gradient(self, model: nn.Module, loss: Loss, axis: int = 0) -> Gradient:
        """Return a function of (samples, keep, *rest) that leaves the gradient of the loss in the weights' `grad`.

        It returns the parts of the loss. Over several processes gradients are averaged.

        Args:
            model: whose weights learn.
            loss: function of samples, a named tuple of tensors (M, ...), dropout masks `keep` (layers, M, ...) or None,
                and other arguments, to the loss and its parts.
            axis: of the samples; axes before it, in `keep` too, are of runs.
        """
        compiled, weights = self.compile(loss), flatten(model)

        def gradient(*batch: Any) -> dict[str, Tensor]:
            parts = accumulate_gradient(weights, compiled, *batch, axis=axis)
            average_gradient(weights)
            return parts

        return CudaGraph(gradient) if self._record else gradient


def flatten(model: nn.Module) -> nn.Parameter:
    """Return all weights of a model as one parameter (W,), for which clipping and Adam take a fraction of the time.

    The model's own weights become views of it, in the order of `parameters`, and their gradients views of its gradient,
    so either may be given to an optimizer. Another call returns the same parameter, unless the model was moved or
    copied since. All weights have the same type and device.
    """
    weights = list(model.parameters())
    flat: nn.Parameter | None = vars(model).get("flat_weights")
    if flat is None or flat.data_ptr() != weights[0].data_ptr():
        flat = nn.Parameter(torch.cat([weight.detach().flatten() for weight in weights]))
        flat.grad, sizes = torch.zeros_like(flat), [weight.numel() for weight in weights]
        for weight, data, grad in zip(weights, flat.detach().split(sizes), flat.grad.split(sizes), strict=True):
            weight.data, weight.grad = data.view_as(weight), grad.view_as(weight)
        vars(model)["flat_weights"] = flat  # an assignment would register it as one more weight
    return flat


def accumulate_gradient(
    weights: nn.Parameter, loss: Loss, samples: Any, keep: Tensor | None, *rest: Any, axis: int = 0
) -> dict[str, Tensor]:
    """Leave the gradient of the mean loss in the `grad` of all weights (W,), and return the parts of the loss.

    A CPU takes as many samples at a time as its caches hold; a GPU takes all. The other arguments are those of
    `Accelerator.gradient`.
    """
    assert weights.grad is not None  # `backward` adds to it
    weights.grad.zero_()
    size, num_runs = samples[0].shape[axis], math.prod(samples[0].shape[:axis])
    most = size if samples[0].is_cuda else min(size, max(1, CPU_PIECE // num_runs))
    piece = max(i for i in range(1, most + 1) if size % i == 0)
    pieces = zip(*(x.split(piece, axis) for x in samples), strict=True)
    # on a GPU `keep` may be keys, which all samples share
    masks = [keep] * (size // piece) if keep is None or piece == size else keep.split(piece, axis + 1)
    total: dict[str, Tensor] = {}
    for part, mask in zip(pieces, masks, strict=True):
        value, parts = loss(type(samples)(*part), mask, *rest)
        (value * (piece / size)).backward()
        for name, x in parts.items():
            total[name] = total.get(name, 0) + x.detach() * (piece / size)
    return total


def minibatches(samples: Samples, size: int, generator: torch.Generator) -> Iterator[Samples]:
    """Yield a random split of samples, a named tuple of tensors (M, ...), into parts of `size`."""
    count = len(samples[0])
    if size == count:  # the order within a minibatch does not matter
        yield samples
        return
    for rows in torch.randperm(count, generator=generator, device=generator.device).split(size):
        yield type(samples)(*(x[rows] for x in samples))


def use_deterministic(on: bool) -> None:
    """Restrict torch to deterministic kernels, or lift the restriction. Call it before a GPU is used.

    Sets the environment variable CUBLAS_WORKSPACE_CONFIG, which cuBLAS reads when it starts, unless it is set.
    """
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if on != torch.are_deterministic_algorithms_enabled():  # the call imports torch's compiler, for seconds
        torch.use_deterministic_algorithms(on)
