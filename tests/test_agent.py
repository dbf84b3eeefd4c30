"""The agent: returns and advantages by hand, runs that repeat, resume, never overwrite, and leave what they promise."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("tyro")
import torch

from noisy_envs import ENVIRONMENTS, runs

ROOT = Path(__file__).parents[1]
SMALL = ["--num-envs", "4", "--num-steps", "16", "--minibatch-size", "32", "--update-epochs", "2"]
SMALL += ["--eval-episodes", "3", "--no-gif", "--threads", "1"]


def load(name):
    """Import an agent's file under its own name."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "agents" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


ppo = load("ppo_adapool")


def run(folder, *words):
    summary = ppo.main([*SMALL, "--run-dir", str(folder), *words])
    return summary, max(folder.iterdir(), key=lambda path: path.stat().st_mtime)


@pytest.mark.parametrize(
    ("next_value", "expected"), [(0.5, [1.9307975, 0.995]), (0.0, [1.46525, 0.5])], ids=["truncated", "terminated"]
)
@pytest.mark.parametrize("later", [1.0, 1000.0])
def test_advantages_by_hand(next_value, expected, later):  # C50, C51, C52
    rewards = torch.tensor([[1.0], [1.0], [later]])
    values = torch.tensor([[0.5], [0.5], [1000.0]])  # the value of the next episode's first state must not enter
    next_values = torch.tensor([[0.5], [next_value], [0.5]])
    ended = torch.tensor([[False], [True], [False]])
    found = ppo.advantages(rewards, values, next_values, ended, 0.99, 0.95)
    torch.testing.assert_close(found[:2, 0], torch.tensor(expected))


def test_rollout_bootstraps_from_the_last_observation_and_counts_each_episode():  # C52, C53
    args = ppo.parse([*SMALL, "--num-envs", "8", "--total-timesteps", "2048"])
    trainer_envs, tokens = ppo.make_envs(args, 8, "train")
    trainer_envs.max_steps = 5
    trainer_envs.reset(seed=3)
    agent = ppo.Agent(args, trainer_envs.token_spec, trainer_envs.single_action_space, torch.Generator().manual_seed(0))
    returns = torch.zeros(8)
    tokens, _ = trainer_envs.reset(seed=3)
    batch, _, finished = ppo.rollout(agent.eval(), trainer_envs, tokens, returns, 12, torch.Generator().manual_seed(0))
    assert batch.ended.sum(1).tolist() == [0, 0, 0, 0, 8, 0, 0, 0, 0, 8, 0, 0]
    sums = batch.rewards.split([5, 5, 2])
    torch.testing.assert_close(finished, torch.cat([sums[0].sum(0), sums[1].sum(0)]))
    torch.testing.assert_close(returns, sums[2].sum(0))
    going_on = ~batch.ended[:-1]
    assert (batch.next_values[:-1][going_on] == batch.values[1:][going_on]).all()
    assert (batch.next_values[:-1][~going_on] != batch.values[1:][~going_on]).all()


def test_nothing_is_worth_waiting_for_after_a_terminated_episode():  # C50, C51
    args = ppo.parse([*SMALL, "--env-id", "noisy_envs/BoxWorld-v0", "--num-envs", "64", "--total-timesteps", "2048"])
    envs, tokens = ppo.make_envs(args, 64, "train")
    agent = ppo.Agent(args, envs.token_spec, envs.single_action_space, torch.Generator().manual_seed(0))
    batch, _, finished = ppo.rollout(agent.eval(), envs, tokens, torch.zeros(64), 60, torch.Generator().manual_seed(0))
    over = (batch.rewards == 10) | (batch.rewards == -1)
    assert over.sum() > 5 and (batch.rewards == 10).any() and (batch.ended & ~over).any()
    assert batch.ended[over].all() and (batch.next_values[over] == 0).all()
    assert (batch.next_values[~over] != 0).all()
    assert len(finished) == batch.ended.sum()


def test_evaluation_is_on_levels_that_training_never_meets():
    args = ppo.parse(["--env-id", "noisy_envs/BoxWorld-v0"])
    found = {purpose: ppo.make_envs(args, 50, purpose)[0].state.level for purpose in ("train", "evaluate")}
    assert found["train"].min() >= 0 and found["train"].max() < 100_000 <= found["evaluate"].min()


def test_evaluated_actions_are_the_best_or_drawn():
    args = ppo.parse(["--env-id", "noisy_envs/BoxWorld-v0"])
    assert args.eval_actions == "sampled" and ppo.parse([]).eval_actions == "best"
    envs, tokens = ppo.make_envs(args, 200, "evaluate")
    agent = ppo.Agent(args, envs.token_spec, envs.single_action_space, torch.Generator().manual_seed(0))
    likely = agent(tokens)[0].argmax(-1)
    drawn, best = (
        ppo.decide(agent, tokens, dataclasses.replace(args, eval_actions=how), torch.Generator().manual_seed(0))
        for how in ("sampled", "best")
    )
    assert torch.equal(best, likely) and not torch.equal(drawn, likely) and set(drawn.tolist()) == {0, 1, 2, 3}


def test_a_run_leaves_what_it_promises(tmp_path):
    words = [word for word in SMALL if word != "--no-gif"]
    summary = ppo.main([*words, "--run-dir", str(tmp_path), "--total-timesteps", "256"])
    (folder,) = tmp_path.iterdir()
    names = {path.name for path in folder.iterdir()}
    assert {"curve.png", "episode.gif", "metrics.csv", "checkpoint.pt", "summary.json"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert not any(name.startswith(".") for name in names)
    written = json.loads((folder / "summary.json").read_text())
    assert written["score"] == pytest.approx(summary["score"])
    assert {"commit", "torch", "machine"} <= written["versions"].keys()
    assert written["settings"]["learning_rate"] == ppo.Args.learning_rate
    assert [row["global_step"] for row in runs.read_metrics(folder / "metrics.csv")] == [64, 128, 192, 256]
    from PIL import Image

    with Image.open(folder / "episode.gif") as film:
        assert film.n_frames > 100


@pytest.mark.parametrize(
    "options",
    [[], ["--dropout", "0.1", "--kl-coef", "0.5"], ["--env-id", "noisy_envs/BoxWorld-v0"]],
    ids=["plain", "dropout and KL", "episodes that terminate"],
)
def test_same_seed_same_run_and_resume_is_exact(tmp_path, options):  # C56, C60
    words = ["--total-timesteps", "2560", "--seed", "0", *options]
    first, folder = run(tmp_path / "whole", *words)
    again, _ = run(tmp_path / "again", *words)
    assert first["return"] == again["return"]
    args = ppo.parse([*SMALL, "--run-dir", str(tmp_path / "halves"), *words])
    trainer = ppo.Trainer(args)
    half, trainer.train = 20, None
    metrics = None
    for _ in range(half):
        log = trainer.iterate()
        metrics = metrics or runs.Metrics(trainer.folder, tuple(log))
        metrics.add(trainer.step, log)
    metrics.close()
    trainer.save()
    resumed = ppo.main(["--resume", str(trainer.folder)])
    assert resumed["return"] == first["return"]
    whole, halves = (runs.load_checkpoint(path / "checkpoint.pt") for path in (folder, trainer.folder))
    for name, weight in whole["agent"].items():
        assert torch.equal(weight, halves["agent"][name]), name
    rows = [runs.read_metrics(path / "metrics.csv") for path in (folder, trainer.folder)]
    for one, other in zip(*rows, strict=True):
        same = {name for name in one if one[name] == other[name] or np.isnan(one[name])}
        assert same >= one.keys() - {"charts/SPS"}


def test_two_runs_never_share_a_folder(tmp_path):  # C54
    assert len({runs.new_folder(tmp_path, "run") for _ in range(3)}) == 3


def test_a_paper_id_takes_the_papers_settings():
    args = ppo.parse(["--env-id", "noisy_envs/SimpleCentroid-1v3v28-v0", "--seed", "7"])
    assert (args.hidden_dim, args.num_layers, args.num_heads, args.feedforward_dim) == (8, 3, 8, 32)
    assert (args.minibatch_size, args.update_epochs, args.learning_rate, args.vf_coef) == (8192, 16, 2.5e-3, 0.05)
    assert (args.total_timesteps, args.gamma, args.gae_lambda, args.max_grad_norm) == (4_000_000, 0.99, 0.95, 10.0)
    assert args.seed == 7
    assert args.num_envs * args.num_steps == 8192


def test_a_paper_id_of_tag_takes_its_own_settings():
    args = ppo.parse(["--env-id", "noisy_envs/SimpleTag-1v3v0-v0"])
    assert (args.num_layers, args.num_heads, args.hidden_dim, args.feedforward_dim) == (6, 3, 3, 12)
    assert (args.kl_coef, args.kl_target, args.vf_coef, args.ent_coef) == (0.5, 0.01, 0.0005, 0.005)
    assert args.num_envs * args.num_steps == args.minibatch_size == 8192
    assert (args.update_epochs, args.learning_rate, args.total_timesteps) == (16, 2.5e-3, 4_000_000)
    assert (args.gamma, args.gae_lambda, args.clip_coef, args.max_grad_norm) == (0.99, 0.95, 0.2, 10.0)


def test_a_paper_id_of_box_world_takes_its_own_settings():
    for kind in ("Entities", "Pixels"):
        args = ppo.parse(["--env-id", f"noisy_envs/BoxWorld{kind}-v0"])
        assert (args.num_layers, args.num_heads, args.hidden_dim, args.feedforward_dim) == (6, 6, 6, 24)
        assert (args.kl_coef, args.vf_coef, args.ent_coef, args.dropout, args.init_std) == (0, 0.01, 0, 0.1, 0.02)
        assert args.num_envs * args.num_steps == args.minibatch_size == 14_400
        assert (args.update_epochs, args.learning_rate, args.total_timesteps) == (32, 2.5e-3, 40_000_000)
        assert (args.gamma, args.gae_lambda, args.clip_coef, args.max_grad_norm) == (0.99, 0.95, 0.2, 10.0)


@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_presets_by_name(env_id):
    chosen = {name: ppo.parse(["--env-id", env_id, "--preset", name]) for name in ("paper", "fast")}
    default = ppo.parse(["--env-id", env_id])
    assert default == chosen[default.preset] and default.env_id == env_id
    assert chosen["paper"].num_layers >= 3 and chosen["fast"].num_layers == 2
    assert (default.preset == "fast") == (env_id.split("/")[1] in ppo.GENERAL)


@pytest.mark.parametrize(
    "words",
    [
        ["--num-envs", "0"],
        ["--total-timesteps", "10"],
        ["--minibatch-size", "1"],
        ["--num-heads", "5"],
        ["--attention-scale", "none"],
        ["--resume", "/nowhere"],
        ["--env-id", "noisy_envs/Nothing-v0"],
        ["--learning-rate", "nan"],
        ["--gamma", "1.5"],
        ["--device", "abacus"],
        ["--seed", "-1"],
    ],
    ids="".join,
)
def test_bad_settings_end_with_one_line(words, tmp_path):
    with pytest.raises(SystemExit) as error:
        ppo.main(["--run-dir", str(tmp_path), *words])
    assert words[1] in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint_is_named(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(SystemExit, match=r"checkpoint\.pt is no checkpoint"):
        ppo.main(["--resume", str(tmp_path)])


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):  # C59
    with pytest.raises(SystemExit, match="no longer finite"):
        run(tmp_path, "--total-timesteps", "640", "--learning-rate", "1e6", "--no-anneal-lr", "--max-grad-norm", "1e30")


def test_global_random_state_is_left_alone(tmp_path):
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  the point is the global state
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    run(tmp_path, "--total-timesteps", "128", "--dropout", "0.1")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002


def test_pooling_head_is_the_librarys():
    subprocess.run([sys.executable, ROOT / "tools" / "check_copies.py"], check=True)


def test_environment_seeds_are_apart():
    seeds = [runs.environment_seed(seed, purpose) for seed in range(100) for purpose in ("train", "evaluate")]
    assert np.diff(sorted(seeds)).min() > 10**6


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_demo_learns(tmp_path, seed):
    assert ppo.main(["--seed", str(seed), "--run-dir", str(tmp_path), "--no-gif"])["score"] >= 0.7


@pytest.mark.slow
def test_box_world_is_learned_slowly(tmp_path):
    words = ["--env-id", "noisy_envs/BoxWorld-v0", "--total-timesteps", "524288", "--eval-episodes", "1000"]
    assert ppo.main([*words, "--run-dir", str(tmp_path), "--no-gif"])["return"] >= 1.5  # random play: 0.46


@pytest.mark.slow
def test_the_predator_learns(tmp_path):
    words = ["--env-id", "noisy_envs/SimpleTag-v0", "--seed", "2", "--run-dir", str(tmp_path), "--no-gif"]
    assert ppo.main(words)["score"] >= 0.7
