"""Action distributions, as functions of their parameters: what a policy network returns for each observation.

Parameters are tensors (..., P), so that compiled code and CUDA graphs see tensors only. `A` actions.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from gymnasium import spaces
from torch import Tensor


class Distribution(Protocol):
    """What the agents ask of a distribution over actions."""

    num_parameters: int  # P

    def noise(self, shape: tuple[int, ...], device: str, generator: torch.Generator) -> Tensor:
        """Draw the random numbers (*shape, A) that `sample` takes."""

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Return actions for parameters (..., P) and noise (..., A)."""

    def mode(self, parameters: Tensor) -> Tensor:
        """Return the most probable actions."""

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return the log probability, or its density, of actions: (...)."""

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return the entropy (...)."""

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        """Return KL(old || new) (...) of two distributions by their parameters."""

    def saliency_outputs(self, parameters: Tensor) -> Tensor:
        """Return the outputs (..., A) whose derivatives with respect to the tokens show what moves the action."""


class Gaussian:
    """Independent normal distributions of A numbers; the parameters are means and log standard deviations, P = 2 A."""

    def __init__(
        self,
        num_actions: int,
        log_std_min: float = -20.0,
        log_std_max: float = 2.0,
        *,
        bounded: bool = False,
        center: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        """Set what actions follow from parameters.

        Args:
            num_actions: A.
            log_std_min: lower bound of the log standard deviations, before they are scaled.
            log_std_max: upper bound.
            bounded: whether means pass through tanh, before they are scaled.
            center: action that a mean of 0 stands for.
            scale: distance of the action that a mean of 1 stands for.
        """
        self.num_actions, self.num_parameters = num_actions, 2 * num_actions
        self.log_std_min, self.log_std_max = log_std_min, log_std_max
        self.bounded, self.center, self.scale = bounded, center, scale

    def split(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and log standard deviations, (..., A) each, of parameters (..., 2 A)."""
        mean, log_std = parameters.chunk(2, dim=-1)
        mean, log_std = mean.tanh() if self.bounded else mean, log_std.clamp(self.log_std_min, self.log_std_max)
        if (self.center, self.scale) == (0.0, 1.0):
            return mean, log_std
        return self.center + self.scale * mean, log_std + math.log(self.scale)

    def noise(self, shape: tuple[int, ...], device: str, generator: torch.Generator) -> Tensor:
        """Draw standard normal numbers (*shape, A)."""
        return torch.empty((*shape, self.num_actions), device=device).normal_(generator=generator)

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Return actions (..., A)."""
        mean, log_std = self.split(parameters)
        return mean + noise * log_std.exp()

    def mode(self, parameters: Tensor) -> Tensor:
        """Return the means (..., A)."""
        return self.split(parameters)[0]

    saliency_outputs = mode

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return the log density of actions (..., A): (...)."""
        mean, log_std = self.split(parameters)
        squares = ((action - mean) / log_std.exp()).square()
        return -(0.5 * squares + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return the differential entropy (...)."""
        return (self.split(parameters)[1] + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        """Return KL(old || new) (...)."""
        (mean, log_std), (new_mean, new_log_std) = self.split(old), self.split(new)
        squares = (mean - new_mean).square() + (2 * log_std).exp()
        return (new_log_std - log_std + 0.5 * squares * (-2 * new_log_std).exp() - 0.5).sum(-1)


class Categorical:
    """One of A actions; the parameters are logits, P = A."""

    def __init__(self, num_actions: int) -> None:
        """Set the number of actions."""
        self.num_actions = self.num_parameters = num_actions

    def noise(self, shape: tuple[int, ...], device: str, generator: torch.Generator) -> Tensor:
        """Draw standard Gumbel numbers (*shape, A)."""
        return -torch.empty((*shape, self.num_actions), device=device).exponential_(generator=generator).log()

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Return actions, int64 (...), by the Gumbel-max trick."""
        return (parameters + noise).argmax(-1)

    def mode(self, parameters: Tensor) -> Tensor:
        """Return the most probable actions, int64 (...)."""
        return parameters.argmax(-1)

    def saliency_outputs(self, parameters: Tensor) -> Tensor:
        """Return the log probabilities (..., A)."""
        return parameters.log_softmax(-1)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return the log probability of actions (...): (...)."""
        return parameters.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        """Return the entropy (...)."""
        logs = parameters.log_softmax(-1)
        return -(logs.exp() * logs).sum(-1)

    def kl(self, old: Tensor, new: Tensor) -> Tensor:
        """Return KL(old || new) (...)."""
        old_logs, new_logs = old.log_softmax(-1), new.log_softmax(-1)
        return (old_logs.exp() * (old_logs - new_logs)).sum(-1)


def make_distribution(
    action_space: Any, log_std_min: float, log_std_max: float, *, bounded: bool = False, normalize: bool = False
) -> Distribution:
    """Return a Gaussian for a Box, a Categorical for a Discrete space or a MultiDiscrete one of equal parts.

    Args:
        action_space: of one agent.
        log_std_min: lower bound of a Gaussian's log standard deviations.
        log_std_max: upper bound.
        bounded: whether a Gaussian's means pass through tanh.
        normalize: whether a Gaussian's means of -1 and 1 stand for the bounds of the box.

    Raises:
        ValueError: `normalize`, and the bounds of the box are infinite, or not the same for all actions.
    """
    if not isinstance(action_space, spaces.Box):
        return Categorical(int(action_space.n if isinstance(action_space, spaces.Discrete) else action_space.nvec[-1]))
    center, scale = 0.0, 1.0
    if normalize:
        low, high = float(action_space.low.min()), float(action_space.high.max())
        if not ((action_space.low == low).all() and (action_space.high == high).all() and math.isfinite(high - low)):
            raise ValueError(f"normalize_actions=True: expected actions of equal, finite bounds, got {action_space}")
        center, scale = (low + high) / 2, (high - low) / 2
    num_actions = action_space.shape[-1]
    return Gaussian(num_actions, log_std_min, log_std_max, bounded=bounded, center=center, scale=scale)
