"""PPO's loss and its gradient in one CUDA kernel, for the small networks of agents/ppo_*.py, of many runs at once.

The kernel takes what `fits` allows: encoders whose heads have a width of one, in float32, on a GPU. It computes the
agents' own loss with the same weights, in another order of sums; `cuda/kernels.cu` says how, `fused_source` what it is
compiled for.

Shapes: S runs, M samples each, N tokens, D features, A actions, P parameters of an action distribution, W weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from noisy_envs.nn import cuda_program
from noisy_envs.nn.cuda_program import device_limits
from noisy_envs.nn.fused_source import (
    COEFFICIENTS,
    PARTS,
    Lanes,
    Network,
    Only,
    choose_lanes,
    memory_sizes,
    num_weights,
    source,
    unsupported,
)

MIN_CAPABILITY = 8, 0  # of a GPU: TF32 and reductions of a warp
REDUCTION_THREADS = 256  # of `add_blocks`
MAX_INDEX = 2**31 - 1  # the kernel counts a run's numbers in int32


def fits(agent: Any, network: Network, device: torch.device | str) -> str | None:
    """Return why the kernels do not compute an agent on a device, in a line, or None if they do.

    Args:
        agent: an agent of agents/ppo_*.py.
        network: its description, by `network_of`.
        device: where it would learn.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return f"device={device}: the kernel takes a GPU of NVIDIA"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.cuda is None or capability < MIN_CAPABILITY:
        return f"capability={capability}: the kernel takes a GPU of NVIDIA, at least {MIN_CAPABILITY}"
    reason = unsupported(agent, network) or cuda_program.missing()
    if reason is None and choose_lanes(network, 1, device_limits(device).shared_memory) is None:
        return f"shared_memory={device_limits(device).shared_memory}: the kernel takes more for this network"
    return reason


def divide(network: Network, shape: tuple[int, int], device: torch.device, only: Only) -> Lanes | None:
    """Return how warps are divided for S runs of M samples, None if the device has too little shared memory."""
    limits, (runs, samples) = device_limits(device), shape
    # A step of a rollout has so few samples that most blocks have one: their time counts, not their number.
    share = 1 if only == "FORWARD" else -(-samples // max(1, limits.multiprocessors // runs))
    return choose_lanes(network, share, limits.shared_memory)


def start(network: Network, offsets: dict[str, int], shape: tuple[int, int], device: torch.device) -> None:
    """Begin to compile both kernels in threads, for S runs of M samples; the classes below wait for it."""
    for only in get_args(Only):
        lanes = divide(network, shape, device, only)
        if lanes is not None:
            cuda_program.start(source(network, lanes, offsets, only), device)


class _Kernels:
    """What both kinds of kernels share: the program, and how the work is divided."""

    def __init__(
        self,
        network: Network,
        offsets: dict[str, int],
        shape: tuple[int, int],
        device: torch.device,
        lanes: Lanes | None,
        only: Only,
    ) -> None:
        chosen = lanes or divide(network, shape, device, only)
        if chosen is None:
            raise ValueError(f"device={device}: expected more shared memory")
        self.network = network
        self.device = torch.empty(0, device=device).device  # with its index
        self.lanes, self.sizes = chosen, memory_sizes(network, chosen)
        self.program = cuda_program.load(source(network, chosen, offsets, only), device)
        self.runs, self.threads = shape[0], 32 * chosen.warps
        self._multiprocessors = device_limits(device).multiprocessors

    def blocks(self, samples: int) -> int:
        """Return the number of blocks of each run for so many samples.

        Raises:
            ValueError: there are too many samples.
        """
        if samples * self.network.num_tokens * self.network.num_features > MAX_INDEX:
            raise ValueError(f"samples={samples}: expected at most {MAX_INDEX} numbers of a run")
        tasks = -(-samples // self.lanes.samples)  # one for a warp at a time
        return max(1, min(self._multiprocessors // self.runs, tasks))

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device)

    def check(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device != self.device:
            found = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            raise ValueError(f"{name}: expected {dtype} {shape} on {self.device}, contiguous, got {found}")


class FusedGradient:
    """The gradient of PPO's loss.

    Attributes:
        grad: (S, W), the gradients of the last call.

    Args:
        network: what the kernel is compiled for.
        offsets: where the weights lie, by `weight_offsets`.
        shape: (S, M).
        device: a GPU.
        lanes: how warps are divided; None for the best known.
    """

    def __init__(
        self,
        network: Network,
        offsets: dict[str, int],
        shape: tuple[int, int],
        device: torch.device,
        lanes: Lanes | None = None,
    ) -> None:
        """Compile the kernel, or load it from the disk, and allocate its memory."""
        self._kernels = kernels = _Kernels(network, offsets, shape, device, lanes, "GRADIENT")
        self._shape, self._blocks = shape, kernels.blocks(shape[1])
        sizes, blocks = kernels.sizes, shape[0] * self._blocks
        self._gradient = kernels.program.kernel("gradient", sizes.shared_bytes)
        self._add_blocks = kernels.program.kernel("add_blocks", 4 * REDUCTION_THREADS)
        self._scratch = kernels.empty(blocks * kernels.lanes.warps, sizes.scratch_floats)
        self._sums = kernels.empty(blocks, sizes.sums)
        self.grad = kernels.empty(kernels.runs, num_weights(network))
        self._parts = kernels.empty(kernels.runs, len(PARTS))

    def __call__(
        self, weights: Tensor, samples: Sequence[Tensor], keys: Tensor, coefficients: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return gradients (S, W) and the parts of the loss (S, 5), see `PARTS`; the next call overwrites both.

        All tensors are contiguous, and float32 but for discrete actions and keys.

        Args:
            weights: (S, W), each run's weights one after another in the order of `named_parameters`.
            samples: tokens (S, M, N, D), action (S, M, A) or int64 (S, M), parameters (S, M, P), log_prob, advantage
                and target (S, M), as the agents' `Samples`.
            keys: (S, 2) int64, words of 32 bits, of which dropout follows (`dropout_hash.hashed_masks`).
            coefficients: (S, 6), see `COEFFICIENTS`.
        """
        kernels, network = self._kernels, self._kernels.network
        shape = self._shape
        action_shape = (*shape, network.num_actions) if network.continuous else shape
        kernels.check("weights", weights, tuple(self.grad.shape))
        kernels.check("tokens", samples[0], (*shape, network.num_tokens, network.num_features))
        kernels.check("action", samples[1], action_shape, torch.float32 if network.continuous else torch.int64)
        kernels.check("parameters", samples[2], (*shape, network.num_parameters))
        for name, tensor in zip(("log_prob", "advantage", "target"), samples[3:], strict=True):
            kernels.check(name, tensor, shape)
        kernels.check("keys", keys, (kernels.runs, 2), torch.int64)
        kernels.check("coefficients", coefficients, (kernels.runs, len(COEFFICIENTS)))
        inputs = weights, *samples, keys, coefficients
        grid = kernels.runs * self._blocks, 1
        self._gradient(grid, kernels.threads, *inputs, self._scratch, self._sums, shape[1], self._blocks)
        grid = kernels.sizes.sums // 32, kernels.runs
        self._add_blocks(grid, REDUCTION_THREADS, self._sums, self.grad, self._parts, self._blocks)
        return self.grad, self._parts


class FusedPolicy:
    """The parameters of the action distribution and the values, without gradients and dropout.

    The arguments are those of `FusedGradient`, with the number of runs S in place of a shape.
    """

    def __init__(
        self,
        network: Network,
        offsets: dict[str, int],
        runs: int,
        device: torch.device,
        lanes: Lanes | None = None,
    ) -> None:
        """Compile the kernel, or load it from the disk."""
        self._kernels = kernels = _Kernels(network, offsets, (runs, 1), device, lanes, "FORWARD")
        self._forward = kernels.program.kernel("forward", kernels.sizes.shared_bytes)

    def __call__(self, weights: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return parameters (S, M, P) and values (S, M) for tokens (S, M, N, D), of any number of samples M."""
        kernels, network = self._kernels, self._kernels.network
        shape = runs, samples = kernels.runs, tokens.shape[1]
        kernels.check("weights", weights, (runs, num_weights(network)))
        kernels.check("tokens", tokens, (*shape, network.num_tokens, network.num_features))
        parameters, values = kernels.empty(*shape, network.num_parameters), kernels.empty(*shape)
        blocks = kernels.blocks(samples)
        self._forward((runs * blocks, 1), kernels.threads, weights, tokens, parameters, values, samples, blocks)
        return parameters, values
