"""Train SimpleTag with several settings and seeds, and plot all learning curves in one figure.

    python benchmarks/learning_curves.py [--jobs 2] [--run-dir runs/learning_curves] [--out curves.png]

Complete runs are not repeated, so the same command continues a stopped comparison. The program prints two scores per
run: of the most probable actions on 100 unseen episodes, and of sampled actions in the last 50,000 training steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from noisy_envs.baselines import baseline_returns
from noisy_envs.training.metrics import read_metrics

AGENT = Path(__file__).parents[1] / "agents" / "ppo_adapool.py"
ENV_ID = "noisy_envs/SimpleTag-1v3v0-v0"
PASSED = 0.3  # score
STEPS, SEEDS = 499_712, (1, 2, 3)  # the largest multiple of an update below 500,000
WIDE = "--num-layers 2 --num-heads 4 --embed-dim 32 --feedforward-dim 64 --init-std 0.1 --attention-scale head"
SETTINGS = {
    "the paper's": "",
    "without dropout": "--dropout 0",
    "without dropout and KL penalty": "--dropout 0 --kl-coef 0",
    "… and minibatches of 2,048": "--dropout 0 --kl-coef 0 --minibatch-size 2048",
    "… and 2 layers of width 32": f"--dropout 0 --kl-coef 0 --minibatch-size 2048 --update-epochs 8 {WIDE}",
}


def train(folder: Path, options: str, seed: int) -> Path:
    """Return the folder of a complete run, after training it if there is none."""
    done = [path.parent for path in folder.glob(f"*__{seed}__*/summary.json")]
    if not done:
        arguments = ["--env-id", ENV_ID, "--seed", seed, "--total-timesteps", STEPS, "--run-dir", folder]
        command = [sys.executable, AGENT, *arguments, "--no-capture-video", *options.split()]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        done = [path.parent for path in folder.glob(f"*__{seed}__*/summary.json")]
    return done[0]


def draw(path: Path, curves: dict[str, list[list[dict[str, float]]]]) -> None:
    """Plot normalised scores against steps: a thin line per run and a thick one for the mean."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, (name, runs) in enumerate(curves.items()):
        scores = [[row["charts/normalized_score"] for row in rows] for rows in runs]
        steps = [row["global_step"] for row in runs[0]]
        for score in scores:
            axes.plot(steps, score, color=f"C{number}", alpha=0.3, linewidth=0.8)
        axes.plot(steps, np.mean(scores, axis=0), color=f"C{number}", linewidth=2, label=name)
    axes.axhline(PASSED, color="gray", linestyle=":", label=f"{PASSED}, required of a learning agent")
    axes.set(xlabel="steps", ylabel="normalised score, sampled actions", title=f"{ENV_ID}, ppo_adapool")
    figure.legend(title=f"settings; {len(SEEDS)} seeds and their mean", loc="outside right upper")
    figure.savefig(path, dpi=100)


def main() -> None:
    """Train all runs, print their scores and plot them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="runs in parallel")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/learning_curves"))
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    args = parser.parse_args()
    tasks = [(name, args.run_dir / f"{n}", seed) for n, name in enumerate(SETTINGS) for seed in SEEDS]
    with ThreadPoolExecutor(args.jobs) as pool:
        folders = list(pool.map(lambda task: train(task[1], SETTINGS[task[0]], task[2]), tasks))
    references = baseline_returns(ENV_ID)
    curves: dict[str, list[list[dict[str, float]]]] = {name: [] for name in SETTINGS}
    for (name, _, seed), folder in zip(tasks, folders, strict=True):
        rows = read_metrics(folder / "metrics.csv")
        curves[name].append(rows)
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        late = np.mean([row["charts/episodic_return"] for row in rows[-6:]])
        commit = summary["versions"]["commit"]
        print(
            f"{name:32s} seed {seed}: {summary['score']:6.3f}, "
            f"sampled {references.normalized_score(late):6.3f}; {commit}"
        )
    draw(args.out, curves)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
