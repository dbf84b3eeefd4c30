"""On a GPU, compiled and recorded training is plain training, and goes on where it stopped. `make test-gpu` runs it.

`NOISY_ENVS_GPU_TESTS_ON_CPU=1 pytest tests/training/test_gpu.py` tries the tests themselves where there is no GPU.
"""

import dataclasses
import os
import sys

import pytest
from cases import HEADS
from helpers import ROOT, load_agent, load_supervised

pytest.importorskip("tyro")
torch = pytest.importorskip("torch")

from noisy_envs.training.accelerate import use_deterministic  # noqa: E402
from noisy_envs.training.main import main  # noqa: E402  torch may be missing
from noisy_envs.training.metrics import read_metrics  # noqa: E402
from noisy_envs.training.settings import parse  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and "NOISY_ENVS_GPU_TESTS_ON_CPU" not in os.environ, reason="needs a GPU"
)
ENVIRONMENTS = (
    "noisy_envs/SimpleCentroid-1v3v28-v0",
    "noisy_envs/SimpleTag-1v3v4-v0",
    "noisy_envs/BoxWorldEntities-v0",
    "CartPole-v1",
)
SMALL = ["--device", DEVICE, "--num-envs", "8", "--num-steps", "16", "--update-epochs", "2", "--minibatch-size", "64"]
SMALL += ["--num-layers", "1", "--dropout", "0", "--total-timesteps", "256", "--no-anneal-lr", "--eval-episodes", "4"]
SMALL += ["--no-capture-video"]
PLAIN = ["--no-compile", "--no-cuda-graphs", "--kernel", "torch"]
TIMES = {"charts/SPS"}


def train(agent, folder, *words):
    """Train, and return the rows of `metrics.csv` without times, and the run's folder."""
    main(agent, [*SMALL, "--run-dir", str(folder), *words])
    (run,) = folder.iterdir()
    rows = read_metrics(run / "metrics.csv")
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows], run


@pytest.mark.parametrize(("head", "env_id"), list(zip(HEADS, ENVIRONMENTS, strict=True)))
def test_compiled_and_recorded_training_is_plain_training(head, env_id, tmp_path):
    """By torch, and by the fused kernels where they fit."""
    agent = load_agent(head)
    (plain, *_), _ = train(agent, tmp_path / "plain", "--env-id", env_id, *PLAIN)
    for kernel in ("torch", "auto"):
        (fast, *_), _ = train(agent, tmp_path / kernel, "--env-id", env_id, "--compile", "--kernel", kernel)
        for name, value in plain.items():
            assert fast[name] == pytest.approx(value, rel=1e-3, abs=1e-4, nan_ok=True), (kernel, name)


@pytest.mark.parametrize("kernel", ["torch", "auto"])
@pytest.mark.parametrize(("head", "env_id"), list(zip(HEADS, ENVIRONMENTS[:3], strict=False)))
def test_a_run_among_others_is_the_run_alone(head, env_id, kernel, tmp_path):
    sys.path.insert(0, str(ROOT / "agents"))
    import many_runs

    agent, seeds = load_agent(head), ("1", "2")
    words = [*SMALL, "--env-id", env_id, "--dropout", "0.1", "--no-compile", "--kernel", kernel]
    together = [parse(agent, [*words, "--seed", seed, "--run-dir", str(tmp_path / "together")]) for seed in seeds]
    found, failures = many_runs.run_group(agent, together)
    assert not failures
    for seed, run in zip(seeds, found, strict=True):
        alone, _ = train(agent, tmp_path / seed, *words[len(SMALL) :], "--no-cuda-graphs", "--seed", seed)
        rows = read_metrics(run.folder / "metrics.csv")
        assert len(rows) == len(alone) == 2
        for name, value in alone[0].items():
            assert rows[0][name] == pytest.approx(value, rel=1e-3, abs=1e-4, nan_ok=True), name


def test_a_stopped_run_goes_on(tmp_path):
    agent = load_agent("adapool")
    words = ["--env-id", ENVIRONMENTS[0], "--compile", "--torch-deterministic"]
    try:
        whole, _ = train(agent, tmp_path / "whole", *words)
        _, run = train(agent, tmp_path / "halves", *words, "--total-timesteps", "128")
        main(agent, ["--resume", str(run), "--total-timesteps", "256"])
    finally:
        use_deterministic(False)
    halves = read_metrics(run / "metrics.csv")
    assert len(whole) == len(halves) == 2
    for name, value in whole[-1].items():
        assert halves[-1][name] == pytest.approx(value, rel=1e-3, abs=1e-4, nan_ok=True), name


@pytest.mark.parametrize("pool", HEADS)
def test_a_recorded_step_of_a_set_network_is_a_plain_one(pool, tmp_path):
    """An epoch of KNN-centroid: the same losses but for rounding."""
    for needed in ("matplotlib", "sklearn"):
        pytest.importorskip(needed)
    experiment, knn_centroid = load_supervised("experiment"), load_supervised("knn_centroid")
    args = knn_centroid.Args(
        pooling=(pool,), num_neighbors=(4,), num_sets=2000, epochs=2, device=DEVICE, data_dir=tmp_path, init_std=0.2
    )
    job, rows = experiment.Job(knn_centroid.column_name(4), pool, 1, 1), []
    for compile_it in (False, True):
        own = dataclasses.replace(args, compile=compile_it, out=tmp_path / str(compile_it))
        experiment.train(knn_centroid.make_task(own, job.column), job, own)
        rows.append(read_metrics(job.folder(own.out) / "metrics.csv")[-1])
    for name in ("train_loss", "validation_error"):
        assert rows[1][name] == pytest.approx(rows[0][name], rel=1e-3), name
