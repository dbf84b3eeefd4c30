"""Settings of a run: presets, the command line, and what is refused in one line before anything is made."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases import HEADS, posix
from helpers import ROOT, load_agent

pytest.importorskip("torch")
pytest.importorskip("tyro")
import torch
from training_helpers import BOX, ppo

from noisy_envs import ENVIRONMENTS
from noisy_envs.training.envs import baseline_returns, env_kwargs, make_envs, make_eval_envs, make_vec
from noisy_envs.training.evaluation import make_eval_agent, select_action
from noisy_envs.training.main import main
from noisy_envs.training.settings import LIMITS, MAY_CHANGE, load_presets, parse, preset_args

TAG = ["--env-id", "noisy_envs/SimpleTag-v0"]
GENERAL = ("SimpleCentroid-v0", "SimpleTag-v0", "SimpleTagMPE-v0", "BoxWorld-v0")  # no experiments of the paper
PRESETS = load_presets(ROOT / "agents" / "presets.toml")
TABLES = [(preset, game) for preset, games in PRESETS.items() for game in games]
EXAMPLES = {"simple_centroid": "noisy_envs/SimpleCentroid-1v3v28-v0", "simple_tag": "noisy_envs/SimpleTag-1v3v0-v0"}
EXAMPLES |= {"box_world": "noisy_envs/BoxWorldEntities-v0", "gymnasium": "CartPole-v1"}

# appendix of Brothers 2025: all that is a setting of learning
CENTROID = {
    "total_timesteps": 4_000_000, "num_envs": 64, "num_steps": 128, "learning_rate": 2.5e-3, "anneal_lr": False,
    "gamma": 0.99, "gae_lambda": 0.95, "update_epochs": 16, "minibatch_size": 8192, "clip_coef": 0.2, "ent_coef": 0.0,
    "vf_coef": 0.05, "kl_coef": 0.0, "kl_target": 0.01, "max_grad_norm": 10.0, "num_layers": 3, "num_heads": 8,
    "embed_dim": 8, "feedforward_dim": 32, "mlp_dim": 32, "role_dim": 4, "dropout": 0.1, "init_std": 0.2,
    "attention_scale": "embed", "log_std_min": -1.0, "log_std_max": 1.0,
}  # fmt: skip
PAPER = {
    "simple_centroid": CENTROID,
    "simple_tag": CENTROID | {
        "num_layers": 6, "num_heads": 3, "embed_dim": 3, "feedforward_dim": 12, "vf_coef": 0.0005, "ent_coef": 0.005,
        "kl_coef": 0.5,
    },
    "box_world": CENTROID | {
        "total_timesteps": 40_000_000, "num_envs": 480, "num_steps": 30, "minibatch_size": 14_400, "update_epochs": 32,
        "num_layers": 6, "num_heads": 6, "embed_dim": 6, "feedforward_dim": 24, "init_std": 0.02, "vf_coef": 0.01,
    },
}  # fmt: skip


# code of the authors' submission (agbrothers/pooling at 993cbc9), where it differs from the text
CODE = {"attention_scale": "head", "scale_residuals": False, "class_token_init": "uniform", "query_vector": "adapool"}
CODE |= {"adam_eps": 1e-8}
AUTHORS = {
    "simple_centroid": {"total_timesteps": 250 * 4096, "num_envs": 32, "minibatch_size": 4096} | CODE,
    "simple_tag": CODE,
    "box_world": {"total_timesteps": 3000 * 96 * 150, "num_envs": 96, "num_steps": 150} | CODE,
}
AUTHORS["simple_centroid"]["normalize_actions"] = True


# presets


@pytest.mark.parametrize("game", AUTHORS)
def test_the_authors_settings_differ_from_the_papers_text(game):
    text, code = (parse(ppo, ["--env-id", EXAMPLES[game], "--preset", name]) for name in ("paper-text", "paper"))
    changed = {name: x for name, x in vars(code).items() if x != getattr(text, name)}
    assert changed == AUTHORS[game] | {"preset": "paper"}
    assert code.num_envs * code.num_steps == code.minibatch_size


@pytest.mark.parametrize("game", PAPER)
def test_the_papers_ids_take_the_papers_settings(game):
    args = parse(ppo, ["--env-id", EXAMPLES[game], "--seed", "7"])
    assert {name: getattr(args, name) for name in PAPER[game]} == PAPER[game]
    rest = {field.name for field in dataclasses.fields(ppo.Args)} - PAPER[game].keys()
    own = {"env_id": EXAMPLES[game], "preset": "paper-text", "seed": 7, "compile": shutil.which("g++") is not None}
    assert {name: getattr(args, name) for name in rest} == {
        name: own.get(name, getattr(ppo.Args, name)) for name in rest
    }
    assert args.num_envs * args.num_steps == args.minibatch_size


@pytest.mark.parametrize(("preset", "game"), TABLES, ids=map(".".join, TABLES))
@pytest.mark.parametrize("head", HEADS)
def test_each_table_makes_settings(head, preset, game):
    agent, table = load_agent(head), PRESETS[preset][game]
    args = preset_args(agent, EXAMPLES[game], preset, "cpu")
    assert type(args) is agent.Args and (args.preset, args.env_id) == (preset, EXAMPLES[game])
    assert {name: getattr(args, name) for name in table if name != "compile"} == {
        name: value for name, value in table.items() if name != "compile"
    }
    learned = {field.name for field in dataclasses.fields(agent.Args)} - MAY_CHANGE | {"total_timesteps"}
    assert table.keys() <= learned | {"compile", "eval_deterministic"}


def test_a_table_inherits_what_it_does_not_say(tmp_path):
    path = tmp_path / "presets.toml"
    path.write_text(
        '[paper.a]\ngamma = 0.5\nnum_envs = 3\n[paper.b]\ninherits = "paper.a"\nnum_envs = 4\n'
        '[fast.c]\ninherits = "paper.b"\nseed = 2\n'
    )
    assert load_presets(path) == {
        "paper": {"a": {"gamma": 0.5, "num_envs": 3}, "b": {"gamma": 0.5, "num_envs": 4}},
        "fast": {"c": {"gamma": 0.5, "num_envs": 4, "seed": 2}},
    }


WRONG_LINES = {
    "learning_rat = 0.1": "learning_rat=0.1: did you mean 'learning_rate'? expected a setting of ppo_copy.py",
    'learning_rate = "fast"': "learning_rate='fast': expected a value of type float",
    "num_layers = 2.5": "num_layers=2.5: expected a value of type int",
    'attention_scale = "none"': "attention_scale='none': expected one of 'head', 'embed'",
    "anneal_lr = 1": "anneal_lr=1: expected a value of type bool",
}


@pytest.mark.parametrize("line", WRONG_LINES)
def test_a_wrong_line_of_presets_is_named(tmp_path, monkeypatch, line):
    monkeypatch.setattr(ppo, "__file__", str(tmp_path / "ppo_copy.py"))
    (tmp_path / "presets.toml").write_text(f"[fast.simple_centroid]\n[fast.simple_tag]\n{line}\n[paper]\n")
    assert parse(ppo, []).learning_rate == ppo.Args.learning_rate  # of another table
    with pytest.raises(SystemExit) as error:
        main(ppo, TAG)
    assert str(error.value) == f"error: presets.toml, [fast.simple_tag]: {WRONG_LINES[line]}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[fast.a]\ngamma\n", "line 2"),
        ('[fast.a]\ninherits = "paper.b"', "inherits='paper.b': expected the name of a table"),
    ],
)
def test_presets_that_cannot_be_read_are_named(tmp_path, text, reason):
    path = tmp_path / "presets.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: [^\n]*{re.escape(reason)}"):
        load_presets(path)


@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_presets_by_name(env_id):
    chosen = {name: parse(ppo, ["--env-id", env_id, "--preset", name]) for name in ("paper-text", "paper", "fast")}
    default = parse(ppo, ["--env-id", env_id])
    assert default == chosen[default.preset] and default.env_id == env_id
    assert chosen["paper-text"].num_layers >= 3 and chosen["fast"].num_layers == 2
    assert (default.preset == "fast") == (env_id.split("/")[1] in GENERAL)


# the command line


def test_every_setting_is_explained():
    shown = subprocess.run(
        [sys.executable, ROOT / "agents" / "ppo_maxpool.py", "--env-id", "noisy_envs/SimpleTag-1v3v0-v0", "--help"],
        capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"},
    ).stdout  # fmt: skip
    for field in dataclasses.fields(ppo.Args):
        assert f"--{field.name.replace('_', '-')}" in shown
    assert "(default: 12)" in shown and "(default: 0.0005)" in shown  # the id's own


@posix
@pytest.mark.parametrize("program", ["ppo_avgpool", "compare"])
def test_a_reader_that_has_read_enough_is_no_error(program):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, ROOT / "agents" / f"{program}.py", "--help"],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


# words, and what the line must name where it is not the setting's value
REFUSED = [
    ["--num-envs", "0"],
    ["--total-timesteps", "10"],
    ["--minibatch-size", "1"],
    ["--minibatch-size", "3000"],
    ["--num-heads", "5"],
    ["--resume", "/nowhere"],
    ["--evaluate", "/nowhere"],
    ["--env-id", "noisy_envs/Nothing-v0"],
    ["--env-id", "nowhere:Nothing-v0"],
    ["--preset", "paper", "--env-id", "CartPole-v1"],
    ["--learning-rate", "nan"],
    ["--gamma", "1.5"],
    ["--device", "abacus"],
    ["--device", "meta"],
    ["--seed", "-1"],
    ["--log-std-min", "1"],
    ["--env-kwargs", "colour=red"],
    ["--env-kwargs", "num_signal"],
    ["--env-kwargs", "num_signal=2", "num_signal=3"],
    ["--capture-video", "False"],
    ["--env-kwargs", "num_signal=-3"],
    ["--env-kwargs", "num_noise=3", "--num-noise", "4"],
    ["--num-noise", "4", "28"],
    ["--num-noise", "42", "--env-id", "noisy_envs/BoxWorld-v0"],
    ["--env-kwargs", "num_agents=4", "--env-id", "noisy_envs/BoxWorld-v0"],
    ["--env-kwargs", "observation=rgb", "--env-id", "noisy_envs/BoxWorld-v0"],
    ["--learners", "prey"],
    ["--learners", "predators", "--env-id", "noisy_envs/BoxWorld-v0"],
    ["--learners", "all", "--env-id", "CartPole-v1"],
    ["--record", "episode.gif"],
]


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_bad_settings_end_with_one_line(words, tmp_path):
    with pytest.raises(SystemExit) as error:
        main(ppo, ["--run-dir", str(tmp_path), *words])
    line = str(error.value)
    assert line.startswith("error: ") and "\n" not in line
    assert words[1].split("=")[0] in line
    option, setting = words[0], words[0].removeprefix("--").replace("-", "_")
    assert f"{setting}=" in line or option in ("--resume", "--evaluate", "--env-kwargs", "--capture-video")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["--learners", "second"],
        ["--attention-scale", "none"],
        ["--options", "max_steps=5"],
        ["--num-layers", "two"],
    ],
    ids=" ".join,
)
def test_words_that_no_setting_takes_are_refused_by_the_command_line(words, capsys, tmp_path):
    with pytest.raises(SystemExit) as error:
        main(ppo, ["--run-dir", str(tmp_path), *words])
    assert error.value.code == 2 and words[0] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_each_limit_is_of_a_setting_and_holds():
    settings = {field.name: getattr(ppo.Args, field.name) for field in dataclasses.fields(ppo.Args)}
    assert LIMITS.keys() <= settings.keys() >= MAY_CHANGE
    for name, (lowest, highest) in LIMITS.items():
        assert lowest <= settings[name] <= highest
        for value in (lowest - 1, highest * 2) if highest < float("inf") else (lowest - 1,):
            with pytest.raises(ValueError, match=f"^{name}=.*: expected a number from {lowest} to {highest}"):
                parse(ppo, [f"--{name.replace('_', '-')}", str(value)])


@pytest.mark.parametrize(
    "words",
    [
        ["--num-steps", "1000000000000", "--total-timesteps", "1000000000000000", "--no-anneal-lr"],
        ["--embed-dim", "16384", "--num-layers", "900"],
        ["--eval-episodes", "1000000", "--num-noise", "1000000"],
        [
            "--num-noise",
            "1000000",
            "--num-envs",
            "8",
            "--num-steps",
            "16",
            "--minibatch-size",
            "64",
            "--eval-episodes",
            "2",
        ],
    ],
    ids=" ".join,
)
def test_more_than_the_memory_is_refused_before_it_is_taken(words, tmp_path):
    with pytest.raises(
        SystemExit, match=r"^error: not enough memory: [^\n]* need at least [^\n]* GiB, cpu has [^\n]* GiB$"
    ):
        main(ppo, ["--run-dir", str(tmp_path), *words])


# what settings do to the environments


def test_keyword_arguments_reach_the_environments():
    args = parse(ppo, ["--env-kwargs", "num_signal=5", "num_noise=(0, 28)", "reward_shape=linear"])
    game = make_vec(args, 2, env_kwargs(args)).game
    assert (game.num_signal, game.num_noise, game.reward_shape) == (5, (0, 28), "linear")
    tag = parse(ppo, [*TAG, "--num-noise", "9", "--learners", "predators", "--env-kwargs", "num_predators=2"])
    game = make_vec(tag, 2, env_kwargs(tag)).game
    assert (game.num_obstacles, game.num_predators) == (9, 2)


def test_a_score_is_of_the_game_that_was_played():
    args = parse(ppo, ["--num-noise", "4"])
    assert baseline_returns(args) == baseline_returns(parse(ppo, []))  # as registered
    noisier = dataclasses.replace(args, num_noise=(28,))
    assert baseline_returns(noisier).random < baseline_returns(args).random - 0.05


def test_an_environment_has_the_settings_of_its_game():
    assert parse(ppo, BOX).num_envs == 512 and parse(ppo, []).num_envs == 64
    assert Path(parse(ppo, ["--run-dir", "x"]).run_dir) == Path("x")


def test_evaluation_is_on_levels_that_training_never_meets():
    args = parse(ppo, BOX)
    train, (evaluation, _) = make_envs(args).start.envs.state, make_eval_envs(args, 50)
    assert train.level.min() >= 0 and train.level.max() < 100_000 <= evaluation.state.level.min()


def test_evaluated_actions_are_the_most_probable_or_sampled():
    args = parse(ppo, BOX)
    assert not args.eval_deterministic and parse(ppo, []).eval_deterministic
    envs, tokens = make_eval_envs(args, 200)
    agent = make_eval_agent(ppo, args, envs.token_spec, envs.single_action_space)
    likely = agent(tokens)[0].argmax(-1)
    sampled, best = (
        select_action(agent, tokens, dataclasses.replace(args, eval_deterministic=choice), torch.Generator())
        for choice in (False, True)
    )
    assert torch.equal(best, likely) and not torch.equal(sampled, likely) and set(sampled.tolist()) == {0, 1, 2, 3}
