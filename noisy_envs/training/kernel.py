"""The fused kernels in place of an agent's own loss and network, where they compute the same.

An agent's file may have another loss or network than this package's. So before the kernels are used, their results are
compared with those of the file's own functions, on the first observations.

Shapes: S runs, W weights of an agent, M samples, N tokens, D features.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from noisy_envs.nn import fused
from noisy_envs.nn.fused import FusedGradient, FusedPolicy, fits
from noisy_envs.nn.fused_source import COEFFICIENTS, PARTS, Lanes, Network, Pool, network_of, weight_offsets
from noisy_envs.nn.transformer import EncoderLayer
from noisy_envs.training.accelerate import flatten
from noisy_envs.training.envs import env_kwargs, make_vec
from noisy_envs.training.evaluation import make_eval_agent

NUM_COMPARED = 64  # samples
SAMPLES = "tokens", "action", "parameters", "log_prob", "advantage", "target"
SPREADS = 1.0, 10.0  # of samples as in an update, and of such with rare ratios, advantages and errors of the value
COMPARED = {"ent_coef": 0.37, "vf_coef": 0.61}  # settings that may be 0, in which case parts of the loss go unseen
TOLERANCE = 1e-3  # of a tensor's largest number; the kernels and torch differ by some 1e-5
Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


class FusedRuns:
    """Gradients and policies of S runs by the fused kernels.

    Attributes:
        weights: (S, W), which the kernels read.
        coefficients: settings of the loss of each run, (S, 6), see `fused_source.COEFFICIENTS`.
    """

    def __init__(
        self,
        agent: nn.Module,
        network: Network,
        weights: nn.Parameter,
        all_args: list[Any],
        num_samples: int,
        lanes: Lanes | None,
    ) -> None:
        """Compile the kernels, or load them from the disk.

        Args:
            agent: of one of the runs.
            network: its description.
            weights: of all runs, (S W,), whose gradient `gradient` sets.
            all_args: settings of all runs.
            num_samples: M, of a minibatch of one run.
            lanes: how the gradient's warps are divided, by `fused.divide`.
        """
        runs, offsets = len(all_args), weight_offsets(network, agent.named_parameters())
        self.weights = weights.detach().view(runs, -1)
        rows = [[getattr(args, name, 0.0) for name in COEFFICIENTS] for args in all_args]
        self.coefficients = torch.tensor(rows, dtype=torch.float32, device=weights.device)
        self._gradient = FusedGradient(network, offsets, (runs, num_samples), weights.device, lanes)
        assert weights.grad is not None  # the kernel writes there instead of into memory of its own
        self._gradient.grad = weights.grad.view(runs, -1)
        self._policy = FusedPolicy(network, offsets, runs, weights.device)
        self._no_keys = torch.zeros(runs, 2, dtype=torch.int64, device=weights.device)

    def policy(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return parameters of the action distribution (S, M, P) and values (S, M) for tokens (S, M, N, D)."""
        return self._policy(self.weights, tokens.contiguous())

    def gradient(self, samples: Any, keys: Tensor | None, kl_coef: Tensor) -> dict[str, Tensor]:
        """Leave the gradients of the losses in the weights' `grad`, and return the parts of the losses, (S,) each.

        Args:
            samples: the agent's `Samples`, (S, M, ...).
            keys: (S, 2) of dropout, None without it.
            kl_coef: (S,).
        """
        self.coefficients[:, COEFFICIENTS.index("kl_coef")] = kl_coef
        inputs = self.weights, [x.contiguous() for x in samples], self._no_keys if keys is None else keys
        _, parts = self._gradient(*inputs, self.coefficients)
        return dict(zip(PARTS, parts.clone().unbind(1), strict=True))


def wants_kernels(args: Any) -> bool:
    """Tell whether the settings ask for the kernels."""
    on_gpu = torch.device(args.device).type == "cuda"
    return bool(args.kernel == "fused" or (args.kernel == "auto" and on_gpu))


def start(module: ModuleType, all_args: list[Any]) -> None:
    """Begin to compile the kernels for runs of an agent, where they are wanted, in a thread; `make_fused` waits for it.

    The arguments are those of `make_fused`.
    """
    args = all_args[0]
    if not wants_kernels(args):
        return
    on_cpu = dataclasses.replace(args, device="cpu")
    envs = make_vec(on_cpu, 1, env_kwargs(args))
    agent = make_eval_agent(module, on_cpu, envs.token_spec, envs.single_action_space)
    envs.close()
    device = torch.device(args.device)
    network, reason = describe(module, agent, all_args, device)
    if network is not None and reason is None:
        shape = len(all_args), args.minibatch_size
        fused.start(network, weight_offsets(network, agent.named_parameters()), shape, device)


def make_fused(
    module: ModuleType, agent: Any, all_args: list[Any], weights: nn.Parameter, tokens: Tensor
) -> FusedRuns | None:
    """Return the kernels for runs of an agent, or None where torch is to be used, and say why in a line.

    Args:
        module: the agent's file.
        agent: of the first run, with the weights of the first row.
        all_args: settings of the runs.
        weights: of all runs, (S W,), by `flatten`.
        tokens: observations of the first run, (R, N, D).

    Raises:
        ValueError: `kernel` is "fused", and the kernels do not fit.
    """
    args = all_args[0]
    if not wants_kernels(args):
        return None
    network, reason = describe(module, agent, all_args, weights.device)
    if network is not None and reason is None:
        lanes = fused.divide(network, (len(all_args), args.minibatch_size), weights.device, "GRADIENT")
        reason = difference(module, agent, network, args, tokens, lanes)
        if reason is None:
            return FusedRuns(agent, network, weights, all_args, args.minibatch_size, lanes)
    if args.kernel == "fused":
        raise ValueError(f"kernel='fused': {reason}")
    print(f"kernel: torch, since {reason}")
    return None


def describe(
    module: ModuleType, agent: Any, all_args: list[Any], device: torch.device
) -> tuple[Network | None, str | None]:
    """Return the network of an agent, and why the kernels do not compute it on a device, None if they do."""
    pool = pool_of(agent)
    if pool is None:
        return None, "the network is not that of ppo_adapool.py"
    if module.Samples._fields != SAMPLES:
        return None, f"Samples has the fields {', '.join(module.Samples._fields)}, in the kernel {', '.join(SAMPLES)}"
    dropout, dual_clip = (any(getattr(args, name, 0) > 0 for args in all_args) for name in ("dropout", "dual_clip"))
    network = network_of(agent, pool, dropout=dropout, dual_clip=dual_clip)
    if all_args[0].torch_deterministic:
        return network, "torch_deterministic=True: the kernel adds in no fixed order"
    return network, fits(agent, network, device)


def pool_of(agent: Any) -> Pool | None:
    """Return which pooling head an agent of this package's network seems to have, None for another network."""
    if not all(hasattr(agent, name) for name in ("spec", "encoder", "distribution", "project", "pool", "query_vector")):
        return None
    if not hasattr(agent.encoder, "layers"):
        return None
    names = {name for name, _ in agent.pool.named_parameters()}
    if names:
        return "ClsToken" if "token" in names else "AdaPool"
    x = torch.arange(10.0, device=agent.project[0].weight.device).view(1, 10, 1).expand(1, 10, agent.encoder.embed_dim)
    return "MaxPool" if torch.equal(agent.pool(x, None), x.amax(1)) else "AvgPool"


def difference(
    module: ModuleType, agent: Any, network: Network, args: Any, tokens: Tensor, lanes: Lanes | None
) -> str | None:
    """Return how the kernels' results differ from those of the agent's file, or None if they do not.

    All parts of the loss count here, so that a loss is found that differs for other settings only.
    """
    args = dataclasses.replace(args, **{name: x for name, x in COMPARED.items() if hasattr(args, name)})
    agent = copy.deepcopy(agent)
    for layer in agent.modules():
        if isinstance(layer, EncoderLayer):
            layer.narrow = False  # whose own kernels would be compiled for this one comparison
    tokens = tokens[torch.arange(NUM_COMPARED, device=tokens.device) % len(tokens)]
    kernels = FusedRuns(agent, network, flatten(agent), [args], NUM_COMPARED, lanes)
    generator = torch.Generator(tokens.device).manual_seed(0)
    keys = torch.randint(2**32, (2,), generator=generator, device=tokens.device) if network.dropout else None
    with torch.no_grad():
        outputs = agent(tokens)
    pairs = dict(zip(("the policy", "the value"), zip(kernels.policy(tokens[None]), outputs, strict=True), strict=True))
    reason = compare(pairs)
    for spread in SPREADS:
        samples = draw_samples(module, agent, tokens, outputs, spread, generator)
        reason = reason or compare_gradients(module, agent, args, kernels, samples, keys)
    return reason


def draw_samples(
    module: ModuleType, agent: Any, tokens: Tensor, outputs: tuple[Tensor, Tensor], spread: float, generator: Any
) -> Any:
    """Return samples for tokens (M, N, D): old parameters, advantages and targets farther apart the larger `spread`."""
    parameters, value = outputs

    def draw(like: Tensor) -> Tensor:
        return spread * torch.empty_like(like).normal_(generator=generator)

    old = parameters + 0.03 * draw(parameters)
    noise = agent.distribution.noise((len(tokens),), str(tokens.device), generator)
    odd = torch.arange(len(tokens), device=tokens.device)[:, None] % 2 == 1
    action = agent.distribution.sample(torch.where(odd, old, parameters), noise)  # ratios below and above 1
    log_prob = agent.distribution.log_prob(old, action)
    return module.Samples(tokens, action, old, log_prob, draw(value), spread * draw(value))


def compare_gradients(
    module: ModuleType, agent: Any, args: Any, kernels: FusedRuns, samples: Any, keys: Tensor | None
) -> str | None:
    """Return how the parts of the loss, or their gradients, differ from those of the agent's file, None if not."""
    kl_coef = samples.target.new_tensor(0.3)
    loss, parts = module.ppo_loss(args, agent, samples, keys, kl_coef)
    gradients = torch.autograd.grad(loss, list(agent.parameters()), materialize_grads=True)
    batch = type(samples)(*(x[None] for x in samples))
    found = kernels.gradient(batch, None if keys is None else keys[None], kl_coef[None])
    if parts.keys() != found.keys():
        return f"the loss has the parts {', '.join(parts)}, in the kernel {', '.join(found)}"
    named = zip(agent.named_parameters(), gradients, strict=True)
    reason = compare({f"the loss's {name}": (found[name], part.detach()) for name, part in parts.items()})
    largest = max(float(x.abs().max()) for x in gradients)  # beside which rounding hides small ones
    return reason or compare({f"the gradient of {name}": (weight.grad, x) for (name, weight), x in named}, largest)


def compare(pairs: dict[str, tuple[Tensor, Tensor]], largest: float = 1.0) -> str | None:
    """Return which of the kernels' results differs from the file's, or None; `largest` is that of all numbers."""
    for name, (mine, own) in pairs.items():
        error, size = float((mine.flatten() - own.flatten()).abs().max()), float(own.abs().max())
        if not error <= TOLERANCE * size + 1e-6 * max(largest, 1.0):
            return f"{name} differs from the file's by {error:.1e} of {size:.1e}"
    return None
