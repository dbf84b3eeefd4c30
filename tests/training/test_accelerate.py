"""Compiled training is plain training, and compiles once."""

import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

torch = pytest.importorskip("torch")
pytest.importorskip("tyro")
from training_helpers import StoppedRun, ppo, train_until  # noqa: E402  torch may be missing

from noisy_envs.training.checkpoint import load_checkpoint  # noqa: E402
from noisy_envs.training.evaluation import make_eval_agent  # noqa: E402
from noisy_envs.training.main import main  # noqa: E402
from noisy_envs.training.metrics import read_metrics  # noqa: E402

PAPER = ["--env-id", "noisy_envs/SimpleCentroid-1v3v28-v0", "--num-envs", "2", "--num-steps", "16", "--num-layers", "1"]
PAPER += ["--update-epochs", "2", "--minibatch-size", "16", "--eval-episodes", "3", "--no-capture-video"]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@needs_compiler
@pytest.mark.slow
def test_a_compiled_run_is_the_same_but_for_rounding(tmp_path):
    folders = {}
    for word in ("--compile", "--no-compile"):
        main(ppo, [*PAPER, "--total-timesteps", "96", "--dropout", "0", "--run-dir", str(tmp_path / word), word])
        (folders[word],) = (tmp_path / word).iterdir()
    rows = [read_metrics(folder / "metrics.csv") for folder in folders.values()]
    for one, other in zip(*rows, strict=True):
        for name in ("losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=2e-3, abs=2e-4), name
    with pytest.raises(SystemExit, match="dropout"):  # told from what may change
        main(ppo, ["--resume", str(folders["--compile"]), "--dropout", "0.1"])
    compiled, plain = (load_checkpoint(folder / "checkpoint.pt")["agent"] for folder in folders.values())
    assert compiled.keys() == plain.keys()
    resumed = main(ppo, ["--resume", str(folders["--compile"]), "--no-compile", "--total-timesteps", "128"])
    assert resumed["steps"] == 128


@needs_compiler
def test_a_compiled_policy_follows_the_weights_and_is_compiled_once(tmp_path, monkeypatch):
    graphs, log = [], StoppedRun.log

    def counted(run, *given):
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return log(run, *given)

    monkeypatch.setattr(StoppedRun, "log", counted)
    words = [*PAPER, "--env-kwargs", "num_noise=(0, 28)", "max_steps=5", "--dropout", "0.1", "--compile"]
    run = train_until(4, [*words, "--total-timesteps", "160", "--run-dir", str(tmp_path)])
    assert len(graphs) == 4 and graphs[0] > 0 and len(set(graphs)) == 1
    with torch.no_grad():
        _, samples, _ = run.collect(run.state, torch.zeros(16, 2, 5))
        plain = make_eval_agent(ppo, run.args, run.agent.spec, run._envs.action_space)
        plain.load_state_dict(run.agent.state_dict())
        torch.testing.assert_close(samples.parameters, plain(samples.tokens)[0], rtol=0, atol=1e-4)
    run.close()


@pytest.mark.parametrize("program", ["ppo_adapool", "many_runs", "compare"])
def test_a_start_does_not_wait_for_what_may_not_be_needed(program, tmp_path):
    (tmp_path / "triton.py").touch()  # the CPU-only build of torch comes without it
    slow = "torch._dynamo torch._inductor triton cuda matplotlib pygame PIL tensorboard pettingzoo ray wandb"
    code = f"import sys, {program}; print(set('{slow}'.split()) & set(sys.modules))"
    paths = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "agents")])
    environment = os.environ | {"PYTHONPATH": paths}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"
