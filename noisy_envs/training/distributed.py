"""Several processes that train one agent, started by `torchrun`: each has a share of environments and minibatches."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def setup(device: str) -> str:
    """Join the processes of this run, if there are several; return the device of this one."""
    if WORLD_SIZE > 1:
        if torch.device(device).type == "cuda":  # a checkpoint names the device of one process
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return device


def teardown() -> None:
    """Leave the processes of this run."""
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


def mean(x: Tensor) -> Tensor:
    """Return the mean of a tensor over all processes."""
    if dist.is_initialized():
        x = x.clone()
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return x


def normalize(x: Tensor) -> Tensor:
    """Scale a tensor to mean 0 and standard deviation 1 over all processes."""
    center = mean(x.mean())
    spread = mean((x - center).square().mean()).sqrt()
    return (x - center) / (spread + 1e-8)


def average_gradient(weights: nn.Parameter) -> None:
    """Replace the gradient of all weights (W,) by its mean over all processes."""
    if dist.is_initialized() and weights.grad is not None:
        weights.grad.copy_(mean(weights.grad))
