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


def average_gradients(model: nn.Module) -> None:
    """Replace the gradients of a model by their means over all processes, in one message."""
    if not dist.is_initialized():
        return
    weights = [weight for weight in model.parameters() if weight.grad is not None]
    average = mean(torch.cat([weight.grad.flatten() for weight in weights if weight.grad is not None]))
    for weight, part in zip(weights, average.split([weight.numel() for weight in weights]), strict=True):
        weight.grad = part.view_as(weight)
