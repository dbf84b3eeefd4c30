"""Collect runs as JSON lines, which tools/make_results.py reads: python tools/collect_runs.py OUT.jsonl FOLDER...

    python tools/collect_runs.py docs/data/query_vector.jsonl runs/many runs/evaluation__20261130-175351

A line holds a run: agent, environment, SNR, preset, the settings that differ from the preset (and those in
`ALWAYS`), seed, steps; normalised scores with 95% intervals of an evaluation by the "best" actions and, with the folder
of an evaluation by --no-eval-deterministic, by "sampled" ones; training scores in forty bins, the highest of them and
the last; the largest KL divergence of an update, and the share of updates above 1; commit and versions. Presets are
those of this checkout: collect at the commit that trained.

The runs in OUT stay. Unfinished or damaged runs, and second runs of the same settings and seed, are refused by name;
the exit status is then 1.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from noisy_envs import registration
from noisy_envs.rendering.agent_policy import load_file
from noisy_envs.training.checkpoint import checkpoint_errors, read_summary, to_json
from noisy_envs.training.files import write_atomically
from noisy_envs.training.metrics import read_metrics
from noisy_envs.training.run_lines import BINS, name_of, read_lines
from noisy_envs.training.settings import MAY_CHANGE, preset_args
from noisy_envs.training.statistics import Rows

AGENTS = Path(__file__).parents[1] / "agents"
ALWAYS = {"query_vector", "total_timesteps"}  # experiments vary them, and presets may come to differ in them
NO_SETTINGS = (MAY_CHANGE - {"total_timesteps"}) | {"env_id", "env_kwargs", "num_noise", "preset", "seed"}
Evaluations = dict[tuple[str, ...], list[dict[str, Any]]]  # by the run's `key`
load = functools.cache(functools.partial(load_file, agents=AGENTS))


def rounded(value: Any) -> Any:
    """Round numbers in lists to four digits; None, an unknown number, stays."""
    if isinstance(value, list):
        return [rounded(x) for x in value]
    return None if value is None else float(f"{value:.4g}")


def key(run: Path | str) -> tuple[str, ...]:
    """Return the last parts of a run's path, which stay if its sweep is moved."""
    return Path(run).resolve().parts[-4:]


def own_settings(module: ModuleType, saved: dict[str, Any]) -> dict[str, Any]:
    """Return those of a run's settings that differ from its preset, and those in ALWAYS."""
    preset = to_json(vars(preset_args(module, saved["env_id"], saved["preset"], "cpu")))
    names = saved.keys() - NO_SETTINGS
    return {name: saved[name] for name in sorted(names) if name in ALWAYS or saved[name] != preset.get(name)}


@functools.cache
def snr(env_id: str, options: str) -> float:
    """Return the SNR of an environment with options in JSON."""
    env_kwargs = json.loads(options)
    other = registration.find(env_id)[0] == registration.OTHER
    setting = load("compare").Setting(env_id, env_kwargs.get("num_noise") if other else None)
    return float(setting.snr(env_kwargs))


def bin_scores(rows: Rows) -> np.ndarray:
    """Return mean normalised scores (BINS,) of the episodes that ended in each bin of steps; NaN where none did."""
    last, bins = rows[-1]["global_step"], [[] for _ in range(BINS)]  # type: tuple[float, list[list[float]]]
    for row in rows:
        if np.isfinite(row["charts/normalized_score"]):
            bins[int(-(-row["global_step"] * BINS // last)) - 1].append(row["charts/normalized_score"])
    return np.array([np.mean(scores) if scores else np.nan for scores in bins])


def read_evaluations(folders: Sequence[Path]) -> Evaluations:
    """Return the results of all evaluations in folders, by run."""
    found: Evaluations = {}
    for path in sorted(path for folder in folders for path in folder.rglob("evaluation.json")):
        for result in read_summary(path)["results"]:
            found.setdefault(key(result["run"]), []).append(result)
    return found


def score_by_actions(summary: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return score and ends of the interval by actions, "best" or "sampled", in the environment of the training."""
    same = [x for x in results if all(x[name] == summary[name] for name in ("env_id", "env_kwargs"))]
    own = summary | {"eval_deterministic": summary["settings"]["eval_deterministic"]}
    scores = {x["eval_deterministic"]: rounded([x["score"], *x["score_95"]]) for x in (*same, own)}
    return {"best" if best else "sampled": scores[best] for best in sorted(scores, reverse=True)}


def describe(folder: Path, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the line of a finished run, with the results of later evaluations.

    Raises:
        ValueError, OSError: the run is not finished, or damaged.
    """
    if not (folder / "summary.json").exists():
        raise ValueError(f"{folder}: expected a finished run, which has a summary.json")
    summary, rows = read_summary(folder / "summary.json"), read_metrics(folder / "metrics.csv")
    with checkpoint_errors(folder):
        steps = [row["global_step"] for row in rows]
        if steps != [steps[0] * number for number in range(1, len(steps) + 1)] or steps[-1] != summary["steps"]:
            raise ValueError(f"{folder}: expected metrics of {summary['steps']} steps without gaps")
        if summary["score"] is None:
            raise ValueError(f"{folder}: expected a score, got NaN")
        curve, kl = bin_scores(rows), np.array([row["losses/approx_kl"] for row in rows])
        finite = curve[np.isfinite(curve)].tolist() or [np.nan]  # no episode may have ended
        line = {name: summary[name] for name in ("env_id", "env_kwargs", "seed", "steps", "eval_episodes")} | {
            "agent": summary["agent"].removeprefix("ppo_"),
            "snr": rounded(snr(summary["env_id"], json.dumps(summary["env_kwargs"]))),
            "preset": summary["settings"]["preset"],
            "settings": own_settings(load(summary["agent"]), summary["settings"]),
            "scores": score_by_actions(summary, results),
            "best": rounded(max(finite)),
            "final": rounded(finite[-1]),
            "kl_max": rounded(kl.max()),
            "kl_above_1": rounded((kl > 1).mean()),
            "curve": rounded(curve.tolist()),
            "versions": summary["versions"],
        }
    normalised: dict[str, Any] = json.loads(json.dumps(to_json(line)))
    return normalised


def collect(out: Path, folders: Sequence[Path]) -> list[str]:
    """Add the runs in folders to a file, and return why others are refused."""
    runs = read_lines(out) if out.exists() else {}
    before, refused, evaluations = len(runs), [], read_evaluations(folders)
    files = [path for folder in folders for name in ("metrics.csv", "summary.json") for path in folder.rglob(name)]
    for folder in sorted({path.parent.resolve() for path in files}):
        try:
            run = describe(folder, evaluations.pop(key(folder), []))
        except (ValueError, OSError) as error:
            refused.append(str(error))
            continue
        if runs.setdefault(name_of(run), run) != run:
            refused.append(f"{folder}: expected each run once, but {out} holds another run of {name_of(run)}")
    refused += [
        f"{Path(*parts)}: expected the folder of this run too, not only its evaluation" for parts in evaluations
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, "".join(json.dumps(run, separators=(",", ":")) + "\n" for run in runs.values()))
    print(f"{out}: {len(runs)} runs, {len(runs) - before} of them new; {len(refused)} refused")
    return refused


def main(argv: Sequence[str]) -> None:
    """Collect the runs; the exit status is 1 if one is refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    args = parser.parse_args(argv)
    try:
        refused = collect(args.out, args.folders)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    if refused:
        raise SystemExit("\n".join(["refused:", *refused]))


if __name__ == "__main__":
    main(sys.argv[1:])
