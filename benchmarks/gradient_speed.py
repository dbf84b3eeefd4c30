"""Where an iteration of learning spends its time: nanoseconds a sample for a gradient, and for a rollout.

    python benchmarks/gradient_speed.py [--agent agents/ppo_avgpool.py] [--device cuda] [--threads 2]
        [--env-ids noisy_envs/SimpleCentroid-1v3v28-v0 noisy_envs/SimpleTag-1v3v28-v0]

A gradient is one forward and backward pass of a minibatch by the network, dropout included, without the optimiser; in
the paper's particle games that is the whole batch. A rollout is all steps of an update, with worlds, policy, values
and advantages. Each as the agent runs it: eager, compiled, and on a GPU recorded in CUDA graphs too. An iteration is
one rollout and the gradients of all its samples for each epoch, 16 in the particle games.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from noisy_envs.training.process import format_error
from noisy_envs.training.versions import library_versions

ROOT = Path(__file__).parents[1]


def load(path: Path) -> Any:
    """Import an agent's file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def seconds(run: Callable[[], Any], device: str, repeats: int = 5) -> float:
    """Return the median time of a call, after one to warm up."""
    sync = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    run()
    found = []
    for _ in range(repeats):
        sync()
        start = time.perf_counter()
        run()
        sync()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def measure(ppo: Any, env_id: str, device: str, compile: bool, graphs: bool) -> tuple[float, float, float]:
    """Return nanoseconds a sample of a gradient, of a rollout, and seconds of both first calls."""
    with tempfile.TemporaryDirectory() as folder:
        args = ppo.parse(["--env-id", env_id, "--device", device, "--run-dir", folder])
        trainer = ppo.Trainer(dataclasses.replace(args, compile=compile, cuda_graphs=graphs))
        size, learners = trainer.size, len(trainer.play.tokens)
        noise = trainer.agent.noise((args.num_steps, learners), device, trainer.generator)
        start = time.perf_counter()
        play, samples, _ = trainer.collect(trainer.play, noise)
        samples = type(samples)(*(x[: args.minibatch_size] for x in samples))
        kept = torch.ones(trainer.agent.kept_shape, dtype=torch.bool, device=device)
        coefficient = torch.tensor(args.kl_coef, device=device)
        trainer.gradient(samples, kept, coefficient)
        first = time.perf_counter() - start
        gradient = seconds(lambda: trainer.gradient(samples, kept, coefficient), device)
        rollout = seconds(lambda: trainer.collect(play, noise), device)
        trainer.close()
    return gradient / args.minibatch_size * 1e9, rollout / size * 1e9, first


def main() -> None:
    """Measure and print a table."""
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
    print("| environment | how | a gradient, ns a sample | a rollout, ns a step | both first calls, s |")
    print("|---|---|---|---|---|")
    ways = [("eager", False, False), ("compiled", True, False)]
    if args.device.startswith("cuda"):
        ways.append(("compiled, in CUDA graphs", True, True))
    for env_id in args.env_ids:
        for name, compile, graphs in ways:
            try:
                gradient, rollout, first = measure(ppo, env_id, args.device, compile, graphs)
            except (ValueError, OSError) as error:
                raise SystemExit(f"error: {format_error(error)}") from None
            print(f"| {env_id.split('/')[-1]} | {name} | {gradient:,.0f} | {rollout:,.0f} | {first:.0f} |", flush=True)


if __name__ == "__main__":
    main()
