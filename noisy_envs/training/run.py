"""All of a training run except its algorithm: folder, checkpoints, exact resume, metrics, progress, signals.

An agent's `train(args, run)` calls it; nothing here calls the algorithm.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from noisy_envs import registration
from noisy_envs.randomness import derive_seed
from noisy_envs.rendering.video import write_gif
from noisy_envs.tokens import TokenSpec
from noisy_envs.training import distributed, kernel
from noisy_envs.training.accelerate import Accelerator, Gradient, Loss, flatten
from noisy_envs.training.checkpoint import (
    checkpoint_errors,
    checkpoint_path,
    join_states,
    load_checkpoint,
    read_summary,
    save_checkpoint,
    to_tuples,
    write_summary,
)
from noisy_envs.training.distributed import RANK, WORLD_SIZE
from noisy_envs.training.envs import (
    Envs,
    EnvState,
    baseline_returns,
    can_render,
    env_kwargs,
    make_envs,
    on_gpu,
    steps_per_update,
)
from noisy_envs.training.evaluation import (
    NOT_FINITE,
    check_token_weights,
    evaluate,
    evaluation_summary,
    load_agent,
    load_weights,
    make_eval_agent,
    record_episode,
    solved_label,
)
from noisy_envs.training.files import lock_folder, new_folder
from noisy_envs.training.kernel import FusedRuns, make_fused, wants_kernels
from noisy_envs.training.metrics import MetricsLogger, WandbRun, read_metrics, start_wandb
from noisy_envs.training.plots import plot_curve
from noisy_envs.training.process import on_stop_signal, timestamp, write_stderr
from noisy_envs.training.versions import library_versions

STOPPING = "Stopping after this update. Press Ctrl-C again to stop immediately without saving."


class Run(Accelerator):
    """A training run: what an agent's training loop calls that is not the algorithm.

    Attributes:
        args: settings of the whole run.
        local_args: settings of this process: its share of environments and of a minibatch.
        folder: where everything is written, known to the first process only until the run begins.
        num_iterations: updates of the whole run.
        step: environment steps so far, of all processes.
        stopped: whether training ends after the last checkpoint.
    """

    def __init__(self, module: ModuleType, args: Any, alone: bool = True) -> None:
        """Prepare a run of the agent `module`; nothing is written before `begin`.

        Args:
            module: the agent's file.
            args: settings.
            alone: whether the run reports its progress; others train in this process, too, if it does not.
        """
        super().__init__(args.compile and alone, on_gpu(args) and args.cuda_graphs, args.device)
        self.module, self.args = module, args
        share = {name: getattr(args, name) // WORLD_SIZE for name in ("num_envs", "minibatch_size")}
        self.local_args = dataclasses.replace(args, **share)
        self._alone = alone
        if alone:
            kernel.start(module, [self.local_args])
        self.baselines = baseline_returns(args)
        self.step_size = steps_per_update(args)
        self.num_iterations = args.total_timesteps // self.step_size
        self.folder: Path = args.resume or args.run_dir
        self.step, self.updates, self.seconds, self.first_seconds = 0, 0, 0.0, 0.0
        self._first_step, self._seconds_before = 0, 0.0
        self._lock: IO[bytes] | None = None
        self._wandb: WandbRun | None = None
        self._metrics: MetricsLogger | None = None
        self._bar: Any = None
        self._envs: Any = None
        self._kernels: FusedRuns | None = None
        self._started = 0.0  # of the iteration
        self._stopping = torch.zeros((), device=args.device if WORLD_SIZE > 1 else "cpu")  # whether a signal came
        self.began = False  # whether `begin` succeeded; a later ValueError is a fault of the code
        self.stopped = False

    @property
    def name(self) -> str:
        """Name of the agent's file."""
        return Path(str(self.module.__file__)).stem

    def make_envs(self, like: Envs | None = None) -> Envs:
        """Make this process's environments, with a compiled step if they live on a GPU.

        With `like`, those of a run that trains in the same arrays, they have neither arrays nor a step of their own.
        """
        self._envs = make_envs(self.local_args, like)
        if self._alone:
            self._envs.compile_step(self.compile, self._envs.start)
        return self._envs

    def gradient(self, model: Any, loss: Loss, axis: int = 0) -> Gradient:
        """Return the gradient of an agent's loss, see `Accelerator.gradient`: by the fused kernel where it fits."""
        if not wants_kernels(self.local_args):
            return super().gradient(model, loss, axis)
        weights = flatten(model)
        kernels = make_fused(self.module, model, [self.local_args], weights, self._envs.start.tokens)
        if kernels is None:
            return super().gradient(model, loss, axis)
        self._kernels = kernels
        model.encoder.hash_dropout = True

        def gradient(samples: Any, keys: Tensor | None, kl_coef: Tensor) -> dict[str, Tensor]:
            batch = type(samples)(*(x[None] for x in samples))
            parts = kernels.gradient(batch, None if keys is None else keys[None], kl_coef[None])
            distributed.average_gradient(weights)
            return {name: part[0] for name, part in parts.items()}

        return self.record(gradient)

    def policy(self, agent: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return the agent as a function of tokens (R, N, D): compiled, or the fused kernel that `gradient` took."""
        kernels = self._kernels
        if kernels is None:
            return self.compile(agent)

        def policy(tokens: Tensor) -> tuple[Tensor, Tensor]:
            parameters, values = kernels.policy(tokens[None])
            return parameters[0], values[0]

        return policy

    def generator(self) -> torch.Generator:
        """Return the generator of action noise, minibatches and dropout, on the run's device."""
        seed = derive_seed(self.args.seed, f"process {RANK}")  # apart from the seed of the weights
        return torch.Generator(self.args.device).manual_seed(seed)

    def begin(
        self, agent: Any, optimizer: Any, generator: torch.Generator, envs: Envs, kl_coef: float
    ) -> tuple[EnvState, float]:
        """Make the run's folder, or restore everything that changes from its checkpoint.

        Returns:
            The state of the environments and the KL coefficient to go on with.

        Raises:
            ValueError, OSError: naming a file that cannot be resumed, or what the head's weights lack for a video.
            FloatingPointError: the first observation is not finite.
        """
        args, state = self.args, envs.start
        if not agent.spec.finite(state.tokens):
            raise FloatingPointError(NOT_FINITE.format(args.env_id))
        if records_video(args):  # before training, not after it
            check_token_weights(agent, state.tokens[:2])  # a few: all attention weights may not fit into memory
        if RANK == 0:
            if args.resume is None:
                noise = f"-{args.num_noise[0]}" if args.num_noise else ""
                name = f"{registration.short_name(args.env_id)}{noise}__{self.name}__{args.seed}__{timestamp()}"
                self.folder = new_folder(args.run_dir, name)
            self._lock = lock_folder(self.folder)  # held until the process ends, or `close`
        if args.resume is not None:
            path = checkpoint_path(args.resume)
            with checkpoint_errors(path):
                state, kl_coef = self._restore(path, agent, optimizer, generator, envs)
            if RANK == 0 and (self.folder / "metrics.csv").exists():
                read_metrics(self.folder / "metrics.csv")  # a damaged one is reported before a step is played
        if args.track and RANK == 0:
            resumed = args.resume is not None
            self._wandb = start_wandb(args.wandb_project, self.folder.name, vars(args), self.folder, resumed)
        self._first_step, self._seconds_before = self.step, self.seconds
        self._announce()
        self.began = True
        if self.updates == self.num_iterations:  # nothing is left but to save settings that changed
            self.checkpoint(agent, optimizer, generator, state, kl_coef)
        return state, kl_coef

    def _announce(self) -> None:
        if RANK == 0 and self._alone:
            args = self.args
            resumed = "" if args.resume is None else f", resumed at step {self.step:,}"
            steps = f"{args.total_timesteps:,} steps, preset {args.preset!r}"
            print(f"run: {self.folder}, {steps}, {args.num_envs} environments{resumed}")

    def _restore(
        self, path: Path, agent: Any, optimizer: Any, generator: torch.Generator, envs: Envs
    ) -> tuple[EnvState, float]:
        content = load_checkpoint(path)
        if len(content["processes"]) != WORLD_SIZE:
            raise ValueError(f"{path} was written by {len(content['processes'])} processes, not by {WORLD_SIZE}")
        local = content["processes"][RANK]
        load_weights(agent, self.module, path, content)
        saved = content["optimizer"]
        if len(saved["param_groups"][0]["params"]) > len(optimizer.param_groups[0]["params"]) == 1:
            saved = join_states(saved)
        optimizer.load_state_dict(saved)
        generator.set_state(local["generator"])
        self.step, self.updates, self.seconds, kl_coef = content["progress"]
        return envs.restore(local["envs"], self.step), kl_coef

    def iterations(self) -> Iterator[int]:
        """Yield the numbers of the updates that are left, and show progress.

        A signal that asks to stop ends this after the current update and its checkpoint; a second one at once.

        Raises:
            KeyboardInterrupt: a signal ended training.
        """
        self._bar = tqdm(
            total=self.args.total_timesteps, initial=self.step, unit=" steps", unit_scale=True, desc="training",
            mininterval=0.5 if sys.stderr.isatty() else 15, dynamic_ncols=True, disable=RANK > 0,
        )  # fmt: skip
        try:
            with on_stop_signal(self._on_signal, once=True):
                while self.updates < self.num_iterations and not self.stopped:
                    self.start_update()
                    yield self.updates
        finally:
            self._bar.close()
            self.close_metrics()
        if self.stopped:
            raise KeyboardInterrupt

    def start_update(self) -> None:
        """Start the clock of an update, which `log` reads."""
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Ask training to end after the next checkpoint."""
        self._stopping.fill_(1)

    def _on_signal(self, *_: Any) -> None:
        self.stop()
        if RANK == 0:
            write_stderr(STOPPING)

    def log(self, learning_rate: float, losses: dict[str, Tensor], stats: dict[str, Tensor]) -> dict[str, float]:
        """Record an update in metrics.csv, TensorBoard and Weights & Biases. It waits for the device, once.

        Args:
            learning_rate: of the update.
            losses: to log, means over the update.
            stats: of the rollout, see `rollout_stats`; other entries are logged with the losses.

        Returns:
            The losses as numbers, means over all processes.

        Raises:
            FloatingPointError: an observation, or a loss, is not finite.
        """
        tensors = losses | stats
        numbers = distributed.mean(torch.stack([x.double() for x in tensors.values()])).tolist()
        return self.record_update(learning_rate, tuple(losses), dict(zip(tensors, numbers, strict=True)))

    def record_update(
        self, learning_rate: float, losses: tuple[str, ...], values: dict[str, float]
    ) -> dict[str, float]:
        """Record an update as `log` does, from the numbers of all its tensors, of which `losses` are names."""
        if values.pop("finite") < 1:
            raise FloatingPointError(NOT_FINITE.format(self.args.env_id))
        returns, lengths, episodes = (values.pop(name) for name in ("returns", "lengths", "episodes"))
        if not all(math.isfinite(values[name]) for name in losses):
            raise FloatingPointError(f"update {self.updates + 1}: losses are no longer finite: {values}")
        spent = time.perf_counter() - self._started
        self.step, self.updates, self.seconds = self.step + self.step_size, self.updates + 1, self.seconds + spent
        self.first_seconds = self.first_seconds or spent
        mean, length = (returns / episodes, lengths / episodes) if episodes else (math.nan, math.nan)
        charts = {
            "episodic_return": mean,
            "episodic_length": length,
            "normalized_score": self.baselines.normalized_score(mean),
            "SPS": self.step_size / spent,
            "learning_rate": learning_rate,
        }
        row = {f"charts/{name}": x for name, x in charts.items()} | {f"losses/{name}": x for name, x in values.items()}
        if RANK == 0:
            self._write(row)
        if self._bar is not None:
            progress = {"return": mean, "score": charts["normalized_score"]}
            self._bar.set_postfix({name: f"{x:.3f}" for name, x in progress.items() if math.isfinite(x)}, refresh=False)
            self._bar.update(self.step_size)
        return values

    def _write(self, row: dict[str, float]) -> None:
        if self._metrics is None:
            before = self.step - self.step_size
            self._metrics = MetricsLogger(self.folder, tuple(row), before or None, self._wandb)
            self._metrics.note("settings", vars(self.args) | library_versions())
        self._metrics.add(self.step, row)  # before the checkpoint: resuming drops surplus rows, but none may lack

    @property
    def checkpoint_due(self) -> bool:
        """Whether it is time to save a checkpoint, or training ends here."""
        last = self.stopped or self.updates == self.num_iterations
        return last or self.updates == 1 or self.updates % self.args.checkpoint_interval == 0

    def checkpoint(
        self, agent: Any, optimizer: Any, generator: torch.Generator, state: EnvState, kl_coef: float
    ) -> None:
        """Save everything that changes, if it is time to, or training ends here."""
        self.stopped = bool(distributed.mean(self._stopping))  # a signal may have reached another process alone
        if not self.checkpoint_due:
            return
        local = {"generator": generator.get_state(), "envs": to_tuples(state)}
        processes: list[Any] = [local] * WORLD_SIZE
        if WORLD_SIZE > 1:
            dist.all_gather_object(processes, local)
        settings = {name: str(x) if name == "run_dir" else x for name, x in vars(self.args).items()}
        content = {
            "args": settings | {"resume": None},
            "versions": library_versions(),
            "file": self.name,
            "agent": agent.state_dict(),
            "optimizer": optimizer.state_dict(),
            "processes": processes,
            "progress": [self.step, self.updates, self.seconds, kl_coef],
        }
        if RANK == 0:
            save_checkpoint(self.folder / "checkpoint.pt", content)
            if self._metrics is not None:
                self._metrics.flush()

    @property
    def speed(self) -> float:
        """Environment steps per second of this process's training, without its first update."""
        later = self.seconds - self._seconds_before - self.first_seconds
        return (self.step - self._first_step - self.step_size) / later if later > 0 else math.nan

    @property
    def has_checkpoint(self) -> bool:
        """Whether the run can be resumed."""
        return (self.folder / "checkpoint.pt").exists()

    @property
    def resume_command(self) -> str:
        """The command that resumes the run."""
        return shlex.join(["python", sys.argv[0], "--resume", str(self.folder)])

    def finish(self, agent: Any) -> dict[str, Any]:
        """Evaluate the agent, write curve.png, summary.json and episode.gif; return the summary.

        Only the first process does; the others return {}.
        """
        if RANK > 0:
            return {}
        args, start = self.args, time.perf_counter()
        eval_agent = make_eval_agent(self.module, args, self._envs.token_spec, self._envs.action_space)
        eval_agent.load_state_dict(agent.state_dict())
        if self._kernels is not None:  # they take any number of samples; other kernels would be compiled for these
            eval_agent.forward = self.policy(eval_agent)
        rows = read_metrics(self.folder / "metrics.csv")
        title = f"{args.env_id}, {self.name}"
        plot_curve(self.folder / "curve.png", rows, *self.baselines, title, solved_label(args))
        summary = self.summarize(eval_agent, evaluate(eval_agent, args, args.eval_episodes), start)
        if records_video(args):  # last: an error in drawing must not cost the result
            write_gif(self.folder / "episode.gif", record_episode(eval_agent, args), fps=10)
        return summary

    def summarize(self, agent: Any, returns: np.ndarray, start: float) -> dict[str, Any]:
        """Write summary.json of the returns (E,) of an evaluation that began at `start`, and return the summary."""
        args = self.args
        summary = {
            "env_id": args.env_id,
            "env_kwargs": env_kwargs(args),
            "agent": self.name,
            "seed": args.seed,
            "steps": self.step,
            **evaluation_summary(returns, args, args, self.baselines),
            "eval_episodes": args.eval_episodes,
            "parameters": sum(weight.numel() for weight in agent.parameters()),
            "train_seconds": self.seconds,
            "first_update_seconds": self.first_seconds,
            "finish_seconds": time.perf_counter() - start,
            "versions": library_versions(),
            "settings": vars(args),
        }
        write_summary(self.folder / "summary.json", summary)
        self.summary = summary
        if self._wandb is not None:
            self._wandb.summarize({name: summary[name] for name in ("score", "return", "score_95", "return_95")})
        return summary

    def close_metrics(self) -> None:
        """Close the files that `log` writes to."""
        if self._metrics is not None:
            self._metrics.close()

    def close(self) -> None:
        """Release the environments and the folder, and end logging to Weights & Biases."""
        if self._envs is not None:
            self._envs.close()
        if self._wandb is not None:
            self._wandb.close()
        if self._lock is not None:
            self._lock.close()


def rollout_stats(batch: Any, spec: TokenSpec) -> dict[str, Tensor]:
    """Return sums over the episodes that ended in a rollout, and whether all observations are finite.

    Args:
        batch: a rollout (T, R, ...) with the fields of `noisy_envs.training.envs.Step`, and `tokens`.
        spec: of the tokens.
    """
    ended = batch.terminated | batch.truncated
    return {
        "returns": (batch.episode_return * ended).sum(),
        "lengths": (batch.episode_length * ended).sum(),
        "episodes": ended.sum(),
        "finite": spec.finite(batch.tokens) & spec.finite(batch.final_tokens),
    }


def records_video(args: Any) -> bool:
    """Tell whether a run records an episode at its end."""
    return args.capture_video and can_render(args)


def saved_updates(args: Any) -> int:
    """Return the number of updates in the checkpoint of the run to resume, 0 for a new run."""
    if args.resume is None:
        return 0
    path = checkpoint_path(args.resume)
    with checkpoint_errors(path):
        _, updates, *_ = load_checkpoint(path)["progress"]
    return int(updates)


def is_complete(module: ModuleType, args: Any) -> dict[str, Any] | None:
    """Return the summary of the run to resume if nothing is left to do, before anything slow is made.

    Raises:
        ValueError: the weights are of another agent or network.
    """
    if args.resume is None or not (args.resume / "summary.json").exists():
        return None
    path = checkpoint_path(args.resume)
    content = load_checkpoint(path)
    with checkpoint_errors(path):
        load_agent(module, args, path, content)
        step, *_ = content["progress"]
        left = args.total_timesteps - step
    if left >= steps_per_update(args):
        return None
    if records_video(args) and not (args.resume / "episode.gif").exists():
        return None
    summary = read_summary(args.resume / "summary.json")
    evaluated = {name: getattr(args, name) for name in ("eval_episodes", "eval_deterministic")}
    settings = summary.get("settings")
    same = isinstance(settings, dict) and settings.items() >= evaluated.items()
    return summary if same and summary.get("steps") == step else None  # or the run was extended since
