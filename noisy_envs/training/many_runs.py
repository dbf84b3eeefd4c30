"""Runs that train together: their weights, Adam's moments, environments and samples are rows of the same arrays.

The network, the loss and the rollout are those of the agent's file, mapped over the runs by `torch.vmap`. Each run has
its own folder, settings, generator and KL coefficient, so it is the run that its agent's file would make alone, up to
rounding, and either program can resume it.

Shapes: `S` runs, `P` weights of an agent, `E` controlled agents of a run, `R` = S · E, `T` steps, `M` samples.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map
from tqdm import tqdm

from noisy_envs.nn.transformer import EncoderLayer
from noisy_envs.randomness import derive_seed
from noisy_envs.training.accelerate import Accelerator, Gradient, Loss, flatten
from noisy_envs.training.envs import Envs, EnvState, eval_env_kwargs, make_vec, num_learners, on_gpu
from noisy_envs.training.evaluation import play_episodes
from noisy_envs.training.kernel import make_fused
from noisy_envs.training.process import on_stop_signal, write_stderr
from noisy_envs.training.run import STOPPING, Run

# settings that `prepare` and `ppo_loss` get as tensors, so they must not branch on them
LOSS_SETTINGS = ("gamma", "gae_lambda", "clip_coef", "vf_coef", "ent_coef", "dropout")
# settings in which runs that train together may differ
OWN_SETTINGS = {
    *LOSS_SETTINGS, "seed", "learning_rate", "kl_coef", "kl_target", "max_grad_norm", "init_std", "run_dir", "resume",
}  # fmt: skip


@dataclass
class Member:
    """A run, and what its agent's file would make for it."""

    run: Run
    agent: Any
    optimizer: torch.optim.Adam
    generator: torch.Generator
    envs: Envs
    state: EnvState  # where it begins
    kl_coef: float
    error: str = ""  # why it ended before the others

    @property
    def weights(self) -> nn.Parameter:
        """All weights of the agent, (P,)."""
        return flatten(self.agent)


class RunStack(nn.Module):
    """The weights of S agents, and their optimizer.

    Attributes:
        weights: (S, P), a row for each run.
    """

    def __init__(self, members: list[Member]) -> None:
        """Copy the weights of the members' agents, and the moments of their optimizers."""
        super().__init__()
        self._agent = [members[0].agent]  # in a list: its weights are not parameters of this module
        shapes = {name: weight.shape for name, weight in members[0].agent.named_parameters()}
        self._shapes, self._sizes = shapes, [shape.numel() for shape in shapes.values()]
        (group,) = members[0].optimizer.param_groups
        self._betas, self._eps = group["betas"], group["eps"]
        self.weights = nn.Parameter(torch.stack([member.weights.detach() for member in members]))
        states = [member.optimizer.state[member.weights] for member in members]  # empty before the first step
        zeros = torch.zeros_like(self.weights[0])
        self._moments = [torch.stack([x.get(name, zeros) for x in states]) for name in ("exp_avg", "exp_avg_sq")]
        steps = [[float(x.get("step", 0))] for x in states]
        self._steps = torch.tensor(steps, dtype=torch.float64, device=self.weights.device)  # (S, 1)

    def call(self, weights: Tensor, function: Callable[..., Any], *inputs: Any) -> Any:
        """Call a function of an agent and `inputs` with the agent's weights replaced by a row (P,)."""
        parts = zip(self._shapes.items(), weights.split(self._sizes), strict=True)
        row = {f"agent.{name}": part.view(shape) for (name, shape), part in parts}
        return functional_call(_Call(self._agent[0], function), row, inputs)

    def step(self, rates: Tensor, max_norms: Tensor, learning: Tensor | None) -> Tensor:
        """Clip the gradients, take a step of Adam, and return the norms (S,), without waiting for a GPU.

        Args:
            rates: learning rates (S, 1).
            max_norms: (S, 1).
            learning: which runs take the step, bool (S, 1); None for all.
        """
        gradient, (mean, square) = self.weights.grad, self._moments
        assert gradient is not None
        weights, (first, second) = self.weights.detach(), self._betas
        norms = gradient.norm(dim=1, keepdim=True)
        gradient = gradient * (max_norms / (norms + 1e-6)).clamp(max=1)  # as torch's clip_grad_norm_ does
        steps = self._steps + 1
        corrections = (1 - first**steps).to(gradient.dtype), (1 - second**steps).to(gradient.dtype)
        new_mean = mean.lerp(gradient, 1 - first)
        new_square = (square * second).addcmul_(gradient, gradient, value=1 - second)
        roots = (new_square / corrections[1]).sqrt() + self._eps
        news = [new_mean, new_square, weights - rates / corrections[0] * new_mean / roots, steps]
        for old, new in zip([mean, square, weights, self._steps], news, strict=True):
            old.copy_(new if learning is None else torch.where(learning, new, old))
        return norms.squeeze(1)

    def unstack(self, row: int, member: Member) -> None:
        """Copy a row back into its member's agent and optimizer."""
        member.weights.data.copy_(self.weights.detach()[row])
        mean, square = (moment[row].clone() for moment in self._moments)
        step = torch.tensor(float(self._steps[row, 0]))
        member.optimizer.state[member.weights] = {"step": step, "exp_avg": mean, "exp_avg_sq": square}


class _Call(nn.Module):
    """A function of an agent as the `forward` of a module: `functional_call` replaces weights of modules alone."""

    def __init__(self, agent: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.agent, self._function = agent, function

    def forward(self, *inputs: Any) -> Any:
        return self._function(self.agent, *inputs)


def check_member(member: Member, first: Member) -> None:
    """Raise ValueError if a run cannot be a row beside the first one."""
    groups = [x.optimizer.param_groups for x in (member, first)]
    same = [{name: x for name, x in group[0].items() if name not in ("params", "lr")} for group in groups]
    plain = len(groups[0]) == 1 and not any(same[0].get(name) for name in ("weight_decay", "amsgrad", "maximize"))
    flat = groups[0][0]["params"][0] is member.weights
    if type(member.optimizer) is not torch.optim.Adam or not (plain and flat) or same[0] != same[1]:
        raise ValueError(
            "make_optimizer: expected Adam of flatten(agent), without weight decay, equal in all runs but for rates"
        )
    weights, buffers = list(member.agent.parameters()), list(member.agent.buffers())
    if buffers or not all(weight.requires_grad for weight in weights):
        raise ValueError("Agent: expected no buffers and no constant weights in runs that train together")


def begin(module: ModuleType, runs: list[Run]) -> list[Member]:
    """Make what runs of an agent need, or restore it from their checkpoints.

    Args:
        module: the agent's file.
        runs: with equal settings but for `OWN_SETTINGS`, at the same update.

    Returns:
        The runs; those that cannot begin have an error.
    """
    envs, members = runs[0].make_envs(), []
    for run in runs:
        args, own = run.local_args, run.make_envs(envs)
        agent = module.Agent(args, own.token_spec, own.action_space).to(args.device).eval()
        member = Member(run, agent, module.make_optimizer(args, agent), run.generator(), own, own.start, args.kl_coef)
        members.append(member)
        try:
            check_member(member, members[0])
            member.state, member.kl_coef = run.begin(agent, member.optimizer, member.generator, own, args.kl_coef)
        except (ValueError, OSError, FloatingPointError) as error:
            member.error = str(error)
    return members


class ManyRuns:
    """Runs of one agent that train together, as rows of the same arrays.

    Attributes:
        members: the runs; a run with an `error` has ended.
        args: settings of the first run; read only what all have in common, all but `OWN_SETTINGS`.
        agent: of the first run: the network, called by `stack` with the weights of each run.
        stack: weights of all runs.
        numbers: settings of the loss of each run, (S,) each.
        envs: environments, whose step takes those of all runs.
        state: where the environments of all runs begin.
        kernels: the fused kernels that compute the agents' policies and gradients, None for torch.
    """

    def __init__(self, module: ModuleType, members: list[Member]) -> None:
        """Stack runs of the agent's file `module`, as `begin` returns them, without errors."""
        self._module, self.members = module, members
        self.args, self.envs, self.agent = members[0].run.local_args, members[0].envs, members[0].agent
        for layer in self.agent.modules():
            if isinstance(layer, EncoderLayer):
                layer.narrow = False  # vmap knows neither its kernels nor its gradient
        self.stack = RunStack(self.members)
        self.state: EnvState = tree_map(lambda *parts: torch.cat(parts), *(member.state for member in self.members))
        self.numbers = {name: self._setting(name) for name in LOSS_SETTINGS if hasattr(self.args, name)}
        self.envs.compile_step(Accelerator(self.args.compile, False, self.args.device).compile, self.state)
        self._accelerator = Accelerator(False, on_gpu(self.args) and self.args.cuda_graphs, self.args.device)
        all_args, tokens = [member.run.args for member in self.members], self.members[0].state.tokens
        self.kernels = make_fused(module, self.agent, all_args, flatten(self.stack), tokens)
        if self.kernels is not None:
            for member in self.members:
                member.agent.encoder.hash_dropout = True
        self._max_norms = self._setting("max_grad_norm")
        # of an update, set by `minibatches`: learning rates, and which runs still learn, on the device and here
        self._rates: Tensor
        self._counted: Tensor
        self._learning: list[bool]
        self._stopping = self._stopped = False  # whether a signal came, and whether the last checkpoint was saved since

    def _setting(self, name: str) -> Tensor:
        """Return a setting of all runs, (S,)."""
        return self.stack.weights.new_tensor([getattr(member.run.args, name) for member in self.members])

    def __len__(self) -> int:
        """Return the number of runs, S."""
        return len(self.members)

    def record(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Record a function of tensors as a CUDA graph, where runs of these settings do."""
        return self._accelerator.record(function)

    def gradient(self, loss: Loss) -> Gradient:
        """Return a function that leaves the gradients in `stack.weights.grad`.

        Args:
            loss: of samples (S, M, ...), dropout masks (S, ...) and KL coefficients (S,), as that of
                `Accelerator.gradient`; not called where the kernels compute it.
        """
        if self.kernels is not None:
            return self.kernels.gradient
        return self._accelerator.gradient(self.stack, loss, axis=1)

    @property
    def running(self) -> list[Member]:
        """The runs that have not ended with an error."""
        return [member for member in self.members if not member.error]

    def kl_coefs(self) -> Tensor:
        """Return the KL coefficients of all runs, (S,)."""
        return self.stack.weights.new_tensor([member.kl_coef for member in self.members])

    def noise(self) -> Tensor:
        """Draw the action noise of a rollout (T, R, A), for each run from its own generator."""
        shape, distribution = (self.args.num_steps, self.envs.num_learners), self.agent.distribution
        return torch.cat([distribution.noise(shape, self.args.device, x.generator) for x in self.members], dim=1)

    def minibatches(self, samples: Any, iteration: int) -> Iterator[Any]:
        """Yield random splits of samples (S, M, ...) for all epochs of an update, until no run learns any more.

        In each run they are those that `accelerate.minibatches` yields. `iteration` is the number of the update.
        """
        rates = [self._rate(member, iteration) for member in self.members]
        for member, rate in zip(self.members, rates, strict=True):
            member.optimizer.param_groups[0]["lr"] = rate  # which a checkpoint holds
        count, size, device = samples[0].shape[1], self.args.minibatch_size, samples[0].device
        self._rates = self._max_norms.new_tensor(rates)
        self._learning, self._counted = [True] * len(self), torch.ones(len(self), dtype=torch.bool, device=device)
        index = torch.arange(len(self), device=device)[:, None]
        for _ in range(self.args.update_epochs):
            batches: Any = [samples]
            if size < count:
                orders = torch.stack(
                    [
                        torch.randperm(count, generator=member.generator, device=device)
                        if learns
                        else torch.arange(count, device=device)
                        for member, learns in zip(self.members, self._learning, strict=True)
                    ]
                )
                batches = (type(samples)(*(x[index, rows] for x in samples)) for rows in orders.split(size, dim=1))
            for batch in batches:
                yield batch
                if not any(self._learning):
                    return

    def dropout_masks(self) -> Tensor | None:
        """Draw what dropout keeps of a minibatch: (S, layers, M, N, H), on a GPU keys (S, 2); None without dropout.

        Only runs that learn and have dropout draw: a run alone would draw nothing else.
        """
        drawn = [
            member.agent.dropout_masks(self.args.minibatch_size, member.generator)
            if learns and member.run.args.dropout
            else None
            for member, learns in zip(self.members, self._learning, strict=True)
        ]
        like = next((mask for mask in drawn if mask is not None), None)
        return None if like is None else torch.stack([torch.ones_like(like) if x is None else x for x in drawn])

    def step(self, kl: Tensor) -> tuple[Tensor, Tensor]:
        """Take a step of the optimizer in the runs that still learn.

        Args:
            kl: divergence of each run's minibatch, (S,), at which a run may learn no more.

        Returns:
            The norms of the gradients (S,), and which runs took the minibatch into account, bool (S,).
        """
        counted, learning = self._counted, None
        if getattr(self.args, "max_kl", 0):
            self._counted = counted & ~(kl > self.args.max_kl)
            self._learning, learning = self._counted.tolist(), self._counted[:, None]  # waits for the device
        return self.stack.step(self._rates[:, None], self._max_norms[:, None], learning), counted

    def _rate(self, member: Member, iteration: int) -> float:
        rate: float = self._module.learning_rate(member.run.args, iteration / member.run.num_iterations)
        return rate

    def iterations(self) -> Iterator[int]:
        """Yield the numbers of the updates that are left, and show progress; a signal ends it after a checkpoint."""
        first = self.members[0].run
        total, step = (len(self) * steps for steps in (self.args.total_timesteps, first.step))
        options: dict[str, Any] = {"unit": " steps", "unit_scale": True, "dynamic_ncols": True}
        options["mininterval"] = 0.5 if sys.stderr.isatty() else 15
        try:
            with on_stop_signal(self._stop, once=True), tqdm(total=total, initial=step, **options) as bar:
                for iteration in range(first.updates, first.num_iterations):
                    if self._stopped or not self.running:
                        break
                    for member in self.running:
                        member.run.start_update()
                    yield iteration
                    bar.update(len(self) * first.step_size)
        finally:
            for member in self.members:
                member.run.close_metrics()
        if self._stopped:
            raise KeyboardInterrupt

    def _stop(self, *_: Any) -> None:
        self._stopping = True
        for member in self.members:
            member.run.stop()
        write_stderr(STOPPING)

    def log(self, iteration: int, losses: dict[str, Tensor], stats: dict[str, Tensor]) -> None:
        """Record an update in the metrics of each run, and adapt its KL coefficient.

        Args:
            iteration: number of the update.
            losses, stats: as `Run.log` takes them, (S,) each.
        """
        tensors = losses | stats
        table = torch.stack([x.double() for x in tensors.values()], dim=1).tolist()  # waits for the device
        for member, numbers in zip(self.members, table, strict=True):
            if member.error:
                continue
            own = dict(zip(tensors, numbers, strict=True))
            try:
                values = member.run.record_update(self._rate(member, iteration), tuple(losses), own)
            except FloatingPointError as error:
                member.error = str(error)
            else:
                member.kl_coef = self._module.adapt(member.run.args, member.kl_coef, values["approx_kl"])

    def checkpoint(self, state: EnvState) -> None:
        """Save each run, where `Run.checkpoint` saves one."""
        self._stopped = self._stopping
        if not (self._stopped or any(member.run.checkpoint_due for member in self.running)):
            return
        for row, member in enumerate(self.members):
            if not member.error:
                self.stack.unstack(row, member)
                own = tree_map(lambda x: x.unflatten(0, (len(self), -1))[row], state)  # noqa: B023  called at once
                member.run.checkpoint(member.agent, member.optimizer, member.generator, own, member.kl_coef)

    def evaluate(self, policy: Callable[[Tensor], Tensor]) -> None:
        """Play the episodes of all runs' evaluations at once, and write the summary of each run.

        `policy` maps the tokens of all runs, run after run, to parameters of the action distribution.
        """
        args, start, count = self.args, time.perf_counter(), self.args.eval_episodes
        envs = make_vec(args, len(self) * count, eval_env_kwargs(args))
        seeds = [derive_seed(x.run.args.seed, "evaluate") + i for x in self.members for i in range(count)]
        tokens, _ = envs.reset(seed=seeds)
        generators = [torch.Generator(args.device).manual_seed(member.run.args.seed) for member in self.members]
        distribution, shape = self.agent.distribution, (count * num_learners(args),)

        def act(tokens: Tensor) -> Tensor:
            parameters = policy(tokens)
            if args.eval_deterministic:
                action: Tensor = distribution.mode(parameters)
                return action
            noise = torch.cat([distribution.noise(shape, args.device, generator) for generator in generators])
            action = distribution.sample(parameters, noise)
            return action

        returns = play_episodes(envs, tokens.flatten(0, -3), act).reshape(len(self), count)
        envs.close()
        for member, own in zip(self.members, returns, strict=True):
            if member.error:
                continue
            if np.isfinite(own).all():
                member.run.summarize(member.agent, own, start)
            else:
                member.error = f"{args.env_id} returned rewards that are not finite"
