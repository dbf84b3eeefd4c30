"""Several processes train one run: means, gradients and environments are those of all."""

import os
import subprocess
import sys
from collections import namedtuple
from types import SimpleNamespace

import pytest
from helpers import ROOT

torch = pytest.importorskip("torch")
pytest.importorskip("tyro")
from training_helpers import SMALL, ppo  # noqa: E402  torch may be missing

from noisy_envs.training import accelerate, distributed  # noqa: E402
from noisy_envs.training.checkpoint import load_checkpoint  # noqa: E402
from noisy_envs.training.envs import Envs, env_kwargs, make_envs, make_vec  # noqa: E402
from noisy_envs.training.main import main  # noqa: E402
from noisy_envs.training.metrics import read_metrics  # noqa: E402
from noisy_envs.training.run import Run  # noqa: E402
from noisy_envs.training.settings import parse  # noqa: E402


@pytest.fixture
def others(monkeypatch):
    """Stand in for another process: what it sends, in the order in which this one asks."""
    sent = []
    fake = SimpleNamespace(
        is_initialized=lambda: True, all_reduce=lambda x: x.add_(sent.pop(0)), get_world_size=lambda: 2
    )
    monkeypatch.setattr(distributed, "dist", fake)
    return sent


def test_one_process_needs_no_other():
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert distributed.mean(x) is x
    torch.testing.assert_close(distributed.normalize(x), (x - x.mean()) / x.std(correction=0))


def test_a_mean_is_over_all_processes(others):
    x, other = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
    others.append(other)
    before = x.clone()
    torch.testing.assert_close(distributed.mean(x), (x + other) / 2)
    assert torch.equal(x, before)


def test_advantages_are_normalised_over_all_processes(others):
    x, other = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    other = 3 * other + 2
    both = torch.cat([x, other])
    others += [other.mean(), (other - both.mean()).square().mean()]
    torch.testing.assert_close(distributed.normalize(x), (x - both.mean()) / both.std(correction=0))
    assert not others


def test_gradients_are_averaged_in_one_message(others):
    random = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    grads = [torch.randn(weight.shape, generator=random) for weight in model.parameters()]
    theirs = [torch.randn(weight.shape, generator=random) for weight in model.parameters()]
    weights = accelerate.flatten(model)
    for weight, grad in zip(model.parameters(), grads, strict=True):
        weight.grad.copy_(grad)
    others.append(torch.cat([x.flatten() for x in theirs]))
    distributed.average_gradient(weights)
    for weight, one, other in zip(model.parameters(), grads, theirs, strict=True):
        torch.testing.assert_close(weight.grad, (one + other) / 2)
    assert not others


def test_a_gradient_step_averages_over_all_processes(others, monkeypatch):
    monkeypatch.setattr(accelerate, "WORLD_SIZE", 2)
    batch = namedtuple("Batch", "x")(torch.ones(4, 3))
    model = torch.nn.Linear(3, 1, bias=False)
    accelerator = accelerate.Accelerator(False, False, "cpu")
    gradient = accelerator.gradient(model, lambda samples, _: (model(samples.x).sum(), {}))
    others.append(torch.tensor([1.0, 2.0, 3.0]))
    gradient(batch, None)  # whose own gradient is 4 for each weight
    assert model.weight.grad.tolist() == [[2.5, 3.0, 3.5]]


def test_a_signal_that_reached_another_process_stops_this_one_too(others):
    run = Run(ppo, parse(ppo, [*SMALL, "--total-timesteps", "640"]))
    run.updates = 3  # when no checkpoint is due
    others.append(torch.zeros(()))
    run.checkpoint(None, None, None, None, 0.0)
    assert not run.stopped
    others.append(torch.ones(()))
    with pytest.raises(AttributeError):  # it saves, for which there is nothing here
        run.checkpoint(None, None, None, None, 0.0)
    assert run.stopped


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])  # as it is asked for, and as a checkpoint has it
def test_each_process_takes_a_gpu_of_its_own(device, monkeypatch):
    chosen = []
    monkeypatch.setattr(distributed, "WORLD_SIZE", 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(distributed, "dist", SimpleNamespace(init_process_group=chosen.append))
    assert distributed.setup(device) == "cuda:1" and chosen == ["cuda:1", "nccl"]


def test_two_processes_train_one_run(tmp_path):
    words = [*SMALL, "--total-timesteps", "128", "--run-dir", str(tmp_path), "--checkpoint-interval", "1"]
    words += ["--dropout", "0.1"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    agent = str(ROOT / "agents" / "ppo_adapool.py")
    done = subprocess.run(
        [*launch, agent, *words], capture_output=True, text=True, env=environment, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.iterdir()  # only one process writes
    assert [row["global_step"] for row in read_metrics(folder / "metrics.csv")] == [64, 128]
    first, second = load_checkpoint(folder / "checkpoint.pt")["processes"]
    args = parse(ppo, words)
    tokens = make_envs(args).start.tokens
    for rank, part in enumerate((first, second)):
        start = Envs(args, make_vec(args, 2, env_kwargs(args)), 2 * rank).start
        assert torch.equal(start.tokens, tokens[2 * rank : 2 * rank + 2])  # environments that one process would have
        assert part["envs"][0][2].tolist() == start.envs.seed.tolist()
    generators = [torch.Generator(), torch.Generator()]
    for generator, part in zip(generators, (first, second), strict=True):
        generator.set_state(part["generator"])
    seeds = {generator.initial_seed() for generator in generators}
    assert len(seeds) == 2 and min(seeds) > 2**32  # no other run's
    (folder / "summary.json").unlink()  # of a complete run nothing is asked
    with pytest.raises(SystemExit, match="was written by 2 processes, not by 1"):
        main(ppo, ["--resume", str(folder)])
