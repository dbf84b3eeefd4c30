"""Measure the two parts of a training iteration, in nanoseconds per sample: gradient and rollout.

    python benchmarks/gradient_speed.py [--agent agents/ppo_avgpool.py] [--device cuda] [--threads 2]
        [--env-ids noisy_envs/SimpleCentroid-1v3v28-v0 noisy_envs/SimpleTag-1v3v28-v0]

A gradient is one forward and backward pass on a minibatch with dropout, without the optimizer step. In the paper's
particle games a minibatch is the whole batch. A rollout is all steps of an update: environments, policy, values and
advantages. Both are measured as the agent runs them: eager, compiled and, on a GPU, recorded in CUDA graphs. An
iteration consists of one rollout and the gradients of all samples in each epoch (16 epochs in the particle games).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from noisy_envs.training.envs import EnvState
from noisy_envs.training.process import format_error
from noisy_envs.training.run import Run
from noisy_envs.training.settings import parse
from noisy_envs.training.versions import library_versions

ROOT = Path(__file__).parents[1]


def load(path: Path) -> ModuleType:
    """Import an agent from its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def seconds(run: Callable[[], Any], device: str, repeats: int = 5) -> float:
    """Return the median time of a call, after a warm-up call."""
    sync = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    run()
    timings = []
    for _ in range(repeats):
        sync()
        start = time.perf_counter()
        run()
        sync()
        timings.append(time.perf_counter() - start)
    return statistics.median(timings)


class FirstUpdate(Run):
    """A run that writes no files, stops after its first update and keeps the calls of the agent's loop.

    Attributes:
        calls: the last rollout and gradient, by name.
        first: total seconds of their first calls.
    """

    def __init__(self, module: ModuleType, args: Any) -> None:
        """Prepare the run."""
        super().__init__(module, args)
        self.calls: dict[str, Callable[[], Any]] = {}
        self.first = 0.0

    def _keep(self, name: str, function: Callable[..., Any]) -> Any:
        def call(*inputs: Any) -> Any:
            start = time.perf_counter()
            result = function(*inputs)
            self.first += 0.0 if name in self.calls else time.perf_counter() - start
            self.calls[name] = partial(function, *inputs)
            return result

        return call

    def record(self, function: Any) -> Any:
        """Keep the rollout."""
        return self._keep("rollout", super().record(function))

    def gradient(self, model: Any, loss: Any, axis: int = 0) -> Any:
        """Keep the gradient."""
        return self._keep("gradient", super().gradient(model, loss, axis))

    def begin(self, agent: Any, optimizer: Any, generator: Any, envs: Any, kl_coef: float) -> tuple[EnvState, float]:
        """Create no folder."""
        return envs.start, kl_coef

    def iterations(self) -> Iterator[int]:
        """Train for one update."""
        yield 0

    def log(self, *_: Any) -> dict[str, float]:
        """Stop training, as an interrupt would."""
        raise KeyboardInterrupt


def measure(ppo: ModuleType, args: Any) -> tuple[float, float, float]:
    """Return nanoseconds per sample of a gradient and of a rollout, and the seconds of both first calls."""
    run = FirstUpdate(ppo, dataclasses.replace(args, update_epochs=1))
    with contextlib.suppress(KeyboardInterrupt):
        ppo.train(run.local_args, run)
    gradient, rollout = (seconds(run.calls[name], args.device) for name in ("gradient", "rollout"))
    return gradient / args.minibatch_size * 1e9, rollout / run.step_size * 1e9, run.first


def main() -> None:
    """Measure each mode and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agent", type=Path, default=ROOT / "agents" / "ppo_adapool.py")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    ids = ["noisy_envs/SimpleCentroid-1v3v28-v0", "noisy_envs/SimpleTag-1v3v28-v0"]
    parser.add_argument("--env-ids", nargs="+", default=ids)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ppo = load(args.agent)
    print(f"{args.agent.name}, {library_versions()}")
    print("| environment | mode | gradient, ns per sample | rollout, ns per step | both first calls, s |")
    print("|---|---|---|---|---|")
    modes = [("eager", False, False), ("compiled", True, False)]
    if args.device.startswith("cuda"):
        modes.append(("compiled, in CUDA graphs", True, True))
    for env_id in args.env_ids:
        for name, compile, graphs in modes:
            try:
                run_args = parse(ppo, ["--env-id", env_id, "--device", args.device])
                run_args = dataclasses.replace(run_args, compile=compile, cuda_graphs=graphs)
                gradient, rollout, first = measure(ppo, run_args)
            except (ValueError, OSError) as error:
                raise SystemExit(f"error: {format_error(error)}") from None
            print(f"| {env_id.split('/')[-1]} | {name} | {gradient:,.0f} | {rollout:,.0f} | {first:.0f} |", flush=True)


if __name__ == "__main__":
    main()
