"""Store the expected training results in tests/data/training/: python tools/store_training.py.

`metrics.json` holds the metrics of three updates for each head and game, in float32 and float64, and the `versions`
that computed them, because rounding depends on the version of torch and the processor. `heads.npz` holds the outputs
and gradients of the library's pooling heads. Run this program only after an intended change of results, and describe
the change in CHANGELOG.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from store_trajectories import store
from torch import Tensor

from noisy_envs.nn import pooling
from noisy_envs.rendering.agent_policy import load_file
from noisy_envs.training.files import write_atomically
from noisy_envs.training.main import main as run_agent
from noisy_envs.training.metrics import read_metrics

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "data" / "training"
HEADS = ("adapool", "avgpool", "clstoken", "maxpool")
GAMES = ("SimpleCentroid-v0", "SimpleTag-v0", "BoxWorldEntities-v0")
SMALL = "--num-envs 16 --num-steps 32 --minibatch-size 128 --update-epochs 2 --total-timesteps 1536 --no-anneal-lr"
SMALL += " --eval-episodes 2 --no-capture-video --preset fast --num-layers 2 --no-compile"


def versions() -> dict[str, str]:
    """Return the versions that rounding depends on."""
    return {"torch": torch.__version__.partition("+")[0], "machine": platform.machine()}


def load_agent(head: str) -> Any:
    """Import the agent with a pooling head from its file."""
    return load_file(f"ppo_{head}", ROOT / "agents")


def double_precision(agent_class: Any) -> Any:
    """Return a subclass of the agent that computes in float64."""

    class Double(agent_class):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.double()

        def forward(self, tokens: Tensor, *rest: Any) -> Any:
            return super().forward(tokens.double(), *rest)

    return Double


def train(head: str, game: str, dtype: str) -> list[dict[str, float]]:
    """Train for three updates and return the rows of `metrics.csv`, without times."""
    agent = load_agent(head)
    if dtype == "float64":
        agent.Agent = double_precision(agent.Agent)
    dropout = "0.1" if game == "SimpleTag-v0" else "0"  # one game also covers dropout
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*SMALL.split(), "--env-id", f"noisy_envs/{game}", "--dropout", dropout, "--run-dir", folder]
        run_agent(agent, arguments)
        (path,) = Path(folder).glob("*/metrics.csv")
        return [{key: x for key, x in row.items() if key != "charts/SPS"} for row in read_metrics(path)]


def pool(head: str) -> dict[str, np.ndarray]:
    """Return a library head's output and gradients (tokens and weights) in float64, for sets with padding."""
    random = torch.Generator().manual_seed(0)
    tokens = torch.randn(5, 7, 8, generator=random, dtype=torch.float64).requires_grad_()
    mask = torch.arange(7) < torch.tensor([7, 5, 1, 0, 3])[:, None]
    heads: dict[str, Any] = {
        "adapool": pooling.AdaPool(8, 2, init_std=0.5),
        "avgpool": pooling.AvgPool(),
        "clstoken": pooling.ClsToken(8),
        "maxpool": pooling.MaxPool(),
    }
    module = heads[head].double()
    out = module(*module.extend(tokens, mask))
    parameters = dict(module.named_parameters())
    weights = torch.randn(out.shape, generator=random, dtype=torch.float64)
    gradients = torch.autograd.grad((out * weights).sum(), [tokens, *parameters.values()], materialize_grads=True)
    arrays = dict(zip(("out", "tokens", *parameters), (out.detach(), *gradients), strict=True))
    return {f"{head}/{name}": value.numpy() for name, value in arrays.items()}


def main() -> None:
    """Store metrics, outputs and gradients."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    FOLDER.mkdir(exist_ok=True)
    metrics = {
        f"{head} {game} {dtype}": train(head, game, dtype)
        for head in HEADS for game in GAMES for dtype in ("float32", "float64")
    }  # fmt: skip
    content = {"versions": versions(), "metrics": metrics}
    write_atomically(FOLDER / "metrics.json", json.dumps(content, indent=1) + "\n")
    store(FOLDER / "heads.npz", {name: array for head in HEADS for name, array in pool(head).items()})


if __name__ == "__main__":
    main()
