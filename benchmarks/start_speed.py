"""Time the parts of a run's start, and a rollout and a gradient after it.

    python benchmarks/start_speed.py [--agent agents/ppo_avgpool.py] [-- --device cuda --no-compile ...]

Arguments after -- are the agent's; they choose the mode: compiled or not, recorded in CUDA graphs or not, which kernel.
A gradient is one forward and backward pass on a minibatch with dropout, without the optimizer step. A rollout is all
steps of an update: environments, policy, values and advantages. The last line of the output is the table as JSON. The
seconds of Python's own start, before the first import, are missing.
"""
# ruff: noqa: E402  (the clock starts before the imports)

from __future__ import annotations

import time

START = time.perf_counter()

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from noisy_envs.rendering.agent_policy import load_file
from noisy_envs.training.envs import Envs, EnvState
from noisy_envs.training.process import format_error
from noisy_envs.training.run import Run
from noisy_envs.training.settings import parse

ROOT = Path(__file__).parents[1]


def seconds(run: Callable[[], Any], device: str, repeats: int = 1) -> float:
    """Return the median time of a call."""
    sync = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
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
        parts: seconds of each part of the start.
    """

    def __init__(self, module: ModuleType, args: Any) -> None:
        """Prepare the run."""
        super().__init__(module, args)
        self.calls: dict[str, Callable[[], Any]] = {}
        self.parts: dict[str, float] = {}

    def _timed(self, part: str, function: Callable[[], Any]) -> Any:
        """Call a function, and keep the seconds of the first call for a part."""
        results: list[Any] = []
        spent = seconds(lambda: results.append(function()), self.args.device)
        self.parts.setdefault(part, spent)
        return results[0]

    def _keep(self, name: str, function: Callable[..., Any]) -> Any:
        def call(*inputs: Any) -> Any:
            self.calls[name] = partial(function, *inputs)
            return self._timed(f"first {name}", self.calls[name])

        return call

    def make_envs(self, like: Envs | None = None) -> Envs:
        """Time how long environments are made."""
        envs: Envs = self._timed("environments", partial(super().make_envs, like))
        return envs

    def record(self, function: Any) -> Any:
        """Keep the rollout."""
        return self._keep("rollout", super().record(function))

    def gradient(self, model: Any, loss: Any, axis: int = 0) -> Any:
        """Keep the gradient, and time the kernels that are compiled for it."""
        return self._keep("gradient", self._timed("kernels", partial(super().gradient, model, loss, axis)))

    def begin(self, agent: Any, optimizer: Any, generator: Any, envs: Any, kl_coef: float) -> tuple[EnvState, float]:
        """Create no folder."""
        return envs.start, kl_coef

    def iterations(self) -> Iterator[int]:
        """Train for one update."""
        yield 0

    def log(self, *_: Any) -> dict[str, float]:
        """Stop training, as an interrupt would."""
        raise KeyboardInterrupt


def measure(ppo: ModuleType, args: Any) -> dict[str, float]:
    """Return seconds of the parts of a start, and of a rollout and a gradient after it, with nanoseconds per sample."""
    device = seconds(lambda: torch.zeros(1, device=args.device), "cpu")  # starts CUDA
    run = FirstUpdate(ppo, dataclasses.replace(args, update_epochs=1))
    with contextlib.suppress(KeyboardInterrupt):
        ppo.train(run.local_args, run)
    parts = {"device": device, **run.parts, "all, to the first gradient": time.perf_counter() - START}
    sizes = {"rollout": run.step_size, "gradient": args.minibatch_size}
    for name, size in sizes.items():
        run.calls[name]()
        parts[f"{name}, ns per sample"] = seconds(run.calls[name], args.device, 5) / size * 1e9
    return parts


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agent", type=Path, default=ROOT / "agents" / "ppo_adapool.py")
    end = list(argv).index("--") if "--" in argv else len(argv)
    agent = parser.parse_args(argv[:end]).agent.resolve()
    ppo = load_file(agent.stem, agent.parent)
    parts = {"import": time.perf_counter() - START}
    try:
        args = parse(ppo, argv[end + 1 :])
        torch.set_num_threads(args.num_threads)
        parts |= measure(ppo, args)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {format_error(error)}") from None
    for name, number in parts.items():
        print(f"{name}: {number:,.0f}" if "ns per" in name else f"{name}: {number:.2f} s")
    print(json.dumps(parts))


if __name__ == "__main__":
    main(sys.argv[1:])
