"""Runs that train together are the runs that each agent's file makes alone: they end, fail and resume on their own."""

import dataclasses
import json
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from cases import by_default, posix
from helpers import ROOT, load_agent

torch = pytest.importorskip("torch")
pytest.importorskip("tyro")

sys.path.insert(0, str(ROOT / "agents"))
sys.path.insert(0, str(ROOT / "tools"))
import many_runs  # noqa: E402
from store_training import double_precision  # noqa: E402

del sys.path[:2]

from noisy_envs.training import accelerate  # noqa: E402
from noisy_envs.training import envs as environments  # noqa: E402
from noisy_envs.training.accelerate import flatten  # noqa: E402
from noisy_envs.training.checkpoint import load_checkpoint, read_summary  # noqa: E402
from noisy_envs.training.files import lock_folder  # noqa: E402
from noisy_envs.training.main import main  # noqa: E402
from noisy_envs.training.metrics import read_metrics  # noqa: E402
from noisy_envs.training.run import Run  # noqa: E402
from noisy_envs.training.settings import max_runs, parse  # noqa: E402

HEADS = ("adapool", "avgpool", "clstoken", "maxpool")
SMALL = """--num-envs 4 --num-steps 16 --minibatch-size 32 --update-epochs 2 --num-layers 2 --embed-dim 8 --num-heads 4
    --feedforward-dim 16 --mlp-dim 8 --total-timesteps 192 --eval-episodes 3 --no-compile"""
SMALL = shlex.split(SMALL)
GAMES = {
    "centroid": "--env-id noisy_envs/SimpleCentroid-v0 --env-kwargs max_steps=6 num_noise=(0,4)",
    "tag": "--env-id noisy_envs/SimpleTag-v0 --env-kwargs max_steps=5 num_prey=2 --learners all --total-timesteps 576",
    "boxes": "--env-id noisy_envs/BoxWorldEntities-v0 --env-kwargs max_steps=7 --no-eval-deterministic",
}
# two runs that differ in all in which runs of the same arrays may differ
OWN = (
    """--seed 1 --learning-rate 0.01 --gamma 0.9 --gae-lambda 0.8 --clip-coef 0.1 --vf-coef 0.5 --dropout 0.3
    --kl-coef 0.2 --kl-target 0.0001 --max-grad-norm 0.01 --init-std 0.3""",
    "--seed 2 --learning-rate 0.003 --gamma 0.99 --ent-coef 0.01 --vf-coef 0.1",
)


def double(head):
    """Import an agent that computes in float64."""
    module = load_agent(head)
    module.Agent = double_precision(module.Agent)
    return module


def settings(module, folder, *runs):
    """Return the settings of runs in folders 0, 1, … of `folder`, from the words in which they differ."""
    words = [*SMALL, "--no-capture-video"]
    return [parse(module, [*words, *shlex.split(x), "--run-dir", str(folder / str(i))]) for i, x in enumerate(runs)]


def alone(module, folder, words):
    """Train a run by the agent's own program, and return its folder."""
    main(module, [*SMALL, "--no-capture-video", *shlex.split(words), "--run-dir", str(folder)])
    return folder_of(folder)


def folder_of(folder):
    """Return the folder of the only run in a folder."""
    (path,) = folder.glob("*/metrics.csv")
    return path.parent


def metrics(folder):
    """Return the rows of a run, without times."""
    return [
        {name: x for name, x in row.items() if name != "charts/SPS"} for row in read_metrics(folder / "metrics.csv")
    ]


def assert_same(found, expected, rel=1e-9):
    """Compare all that two runs leave, up to rounding."""
    assert len(metrics(found)) == len(metrics(expected)) > 1
    for row, other in zip(metrics(found), metrics(expected), strict=True):
        assert row.keys() == other.keys()
        for name, x in row.items():  # returns are summed in float32
            exact = rel if name.startswith("losses/") else max(rel, 1e-5)
            assert x == pytest.approx(other[name], rel=exact, abs=1e-12 if exact < 1e-8 else 1e-5, nan_ok=True), name
    summaries = [read_summary(folder / "summary.json") for folder in (found, expected)]
    assert summaries[0].keys() == summaries[1].keys()
    assert summaries[0]["env_kwargs"] == summaries[1]["env_kwargs"]
    for name in ("return", "return_95", "steps", "parameters", "seed"):
        assert summaries[0][name] == pytest.approx(summaries[1][name], rel=1e-5), name
    contents = [load_checkpoint(folder / "checkpoint.pt") for folder in (found, expected)]
    settings = [{name: x for name, x in content["args"].items() if name != "run_dir"} for content in contents]
    assert settings[0] == settings[1]
    step, updates, _, kl_coef = contents[0]["progress"]
    assert [step, updates, kl_coef] == contents[1]["progress"][:2] + contents[1]["progress"][3:]
    for part in ("agent", "optimizer", "processes"):
        torch.testing.assert_close(contents[0][part], contents[1][part], rtol=max(rel, 1e-7), atol=1e-7)


@by_default(
    ("head", "game"),
    [("adapool", "boxes"), ("avgpool", "tag"), ("clstoken", "centroid"), ("maxpool", "boxes")],
    [(head, game) for head in HEADS for game in GAMES],
)
def test_a_run_among_others_is_the_run_alone(head, game, tmp_path):
    words = [f"{GAMES[game]} {own}" for own in OWN]
    module = double(head)
    together, failures = many_runs.run_group(module, settings(module, tmp_path / "together", *words))
    assert not failures
    for i, own in enumerate(words):
        expected = alone(module, tmp_path / "alone" / str(i), own)
        assert_same(folder_of(tmp_path / "together" / str(i)), expected)
    first, second = (metrics(run.folder) for run in together)
    assert first != second


@pytest.mark.parametrize("words", ["--minibatch-size 16 --dropout 0.1", "--minibatch-size 64 --dual-clip 1.01"])
@pytest.mark.parametrize("head", ["adapool", "clstoken"])
def test_updates_that_end_early_end_in_each_run_on_its_own(head, words, tmp_path, monkeypatch):
    learning, step = [], many_runs.ManyRuns.step

    def watched(runs, *given):
        result = step(runs, *given)
        learning.append(tuple(runs._learning))
        return result

    monkeypatch.setattr(many_runs.ManyRuns, "step", watched)
    module = double(head)
    words += """ --max-kl 0.004 --update-epochs 3 --bounded-means --normalize-actions --query-vector all --adam-eps 1e-8
        --no-scale-residuals --class-token-init uniform"""
    own = [f"{words} --seed {seed} --learning-rate {rate}" for seed, rate in ((1, 0.003), (2, 0.01))]
    many_runs.run_group(module, settings(module, tmp_path / "together", *own))
    for i, arguments in enumerate(own):
        assert_same(folder_of(tmp_path / "together" / str(i)), alone(module, tmp_path / "alone" / str(i), arguments))
    assert {(True, True), (True, False)} <= set(learning)


def test_a_policy_maps_several_steps_as_one_after_the_other(tmp_path):
    module = double("adapool")
    members = [Run(module, args, alone=False) for args in settings(module, tmp_path, *OWN)]
    runs = many_runs.ManyRuns(module, many_runs.begin(module, members))
    policy, steps = many_runs.make_policy(runs), torch.randn(3, *runs.state.tokens.shape).abs()
    with torch.no_grad():
        together, apart = policy(steps.flatten(0, 1)), [policy(tokens) for tokens in steps]
        torch.testing.assert_close(together, tuple(map(torch.cat, zip(*apart, strict=True))))
        first = runs.members[0].agent(steps[0, :4])
    torch.testing.assert_close(tuple(x[:4] for x in apart[0]), first)
    for run in members:
        run.close()


def test_pieces_of_a_minibatch_sum_up_to_its_gradient(tmp_path, monkeypatch):
    module = double("adapool")
    found = []
    for i, piece in enumerate((1024, 16)):  # two runs: 8 samples of each at a time
        monkeypatch.setattr(accelerate, "CPU_PIECE", piece)
        many_runs.run_group(module, settings(module, tmp_path / str(i), *OWN))
        found.append(metrics(folder_of(tmp_path / str(i) / "0")))
    assert found[0] == [pytest.approx(row, rel=1e-9, nan_ok=True) for row in found[1]]


def test_the_layout_of_compiled_agents_changes_nothing(tmp_path):
    module, found = double("adapool"), []
    for option in ("--compile", "--no-compile"):
        many_runs.run_group(module, settings(module, tmp_path / option, f"{OWN[1]} {option}"))
        found.append(metrics(folder_of(tmp_path / option / "0")))
    assert found[0] == [pytest.approx(row, rel=1e-9, nan_ok=True) for row in found[1]]


def test_the_step_of_all_environments_is_compiled_at_once(tmp_path, monkeypatch):
    module, found, compiled = double("adapool"), [], []

    def compiler(accelerator, function):
        def step(state, action):
            compiled.append(len(state.tokens))
            return function(state, action)

        return step if accelerator._compile else function

    for on_gpu in (False, True):
        monkeypatch.setattr(environments, "on_gpu", lambda args, answer=on_gpu: answer)
        monkeypatch.setattr(accelerate.Accelerator, "compile", compiler)
        many_runs.run_group(module, settings(module, tmp_path / str(on_gpu), *(f"{own} --compile" for own in OWN)))
        found.append(metrics(folder_of(tmp_path / str(on_gpu) / "0")))
    assert str(found[0]) == str(found[1])  # NaN is not equal to itself
    assert compiled == [2 * 4] * (1 + 3 * 16)  # once before training, then each step of the rollouts


def test_a_run_that_diverges_ends_alone(tmp_path, monkeypatch):
    step = many_runs.ManyRuns.step

    def spoiled(runs, kl):
        result = step(runs, kl)
        if runs.members[0].run.updates == 1 and len(runs) == 2:
            runs.stack.weights.data[0] = math.nan
        return result

    monkeypatch.setattr(many_runs.ManyRuns, "step", spoiled)
    module, seeds = load_agent("adapool"), ("--seed 1", "--seed 2")
    many_runs.run_group(module, settings(module, tmp_path / "one", seeds[1]))
    finished, ((failed, reason),) = many_runs.run_group(module, settings(module, tmp_path / "two", *seeds))
    assert [run.args.seed for run in finished] == [2] and "no longer finite" in reason
    assert not (failed / "summary.json").exists() and len(metrics(failed)) == 1
    content = load_checkpoint(failed / "checkpoint.pt")
    assert content["progress"][:2] == [64, 1] and all(x.isfinite().all() for x in content["agent"].values())
    assert_same(folder_of(tmp_path / "two" / "1"), folder_of(tmp_path / "one" / "0"), rel=1e-5)


def test_the_program_names_runs_that_failed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        many_runs.ManyRuns, "step", lambda runs, *_: (torch.full((len(runs),), math.nan), torch.tensor(True))
    )
    steps, noise = [], many_runs.ManyRuns.noise

    def counted(runs):
        steps.append(len(runs))
        return noise(runs)

    monkeypatch.setattr(many_runs.ManyRuns, "noise", counted)
    reason = "update 1: losses are no longer finite"
    with pytest.raises(SystemExit, match=rf"^2 of 2 runs failed:\n.*seed-1.*: {reason}.*\n.*seed-2.*: {reason}"):
        run_program(tmp_path)
    out = capsys.readouterr().out
    assert out.count("FAILED, update 1: losses are no longer finite") == 2 and "[1/2]" not in out
    assert len(steps) == 1  # nothing is left to train


def run_program(folder, *words):
    """Run the program in this process."""
    many_runs.main(["--out", str(folder), "--seeds", "1", "2", *words, "--", *SMALL])


def stop_after(monkeypatch, count):
    """Let a signal stop the program in update number `count` of the next runs."""
    log = many_runs.ManyRuns.log

    def stopped(runs, iteration, *given):
        log(runs, iteration, *given)
        if iteration + 1 == count:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(many_runs.ManyRuns, "log", stopped)


def runs_of(folder):
    """Return the folders of all runs, by seed."""
    return {path.parent.parent.name: path.parent for path in folder.glob("**/checkpoint.pt")}


def test_stopped_runs_resume_exactly(tmp_path, monkeypatch, capsys):
    run_program(tmp_path / "whole")
    with monkeypatch.context() as context:
        stop_after(context, 2)
        with pytest.raises(SystemExit, match="130"):
            run_program(tmp_path / "stopped")
    assert "stopped; resume with the same command" in capsys.readouterr().err
    for path in runs_of(tmp_path / "stopped").values():
        assert load_checkpoint(path / "checkpoint.pt")["progress"][:2] == [128, 2]
    run_program(tmp_path / "stopped")
    for seed, path in runs_of(tmp_path / "stopped").items():
        expected = runs_of(tmp_path / "whole")[seed]
        assert str(metrics(path)) == str(metrics(expected))  # NaN is not equal to itself
        contents = [load_checkpoint(run / "checkpoint.pt") for run in (path, expected)]
        torch.testing.assert_close(
            *({name: x[name] for name in ("agent", "optimizer")} for x in contents), rtol=0, atol=0
        )
    run_program(tmp_path / "stopped")
    assert "2 runs, 2 already finished" in capsys.readouterr().out


def test_a_run_is_resumed_by_either_program(tmp_path, monkeypatch, capsys):
    run_program(tmp_path / "whole")
    with monkeypatch.context() as context:
        stop_after(context, 1)
        with pytest.raises(SystemExit, match="130"):
            run_program(tmp_path / "stopped")
    paths = runs_of(tmp_path / "stopped")
    main(load_agent("adapool"), ["--resume", str(paths["seed-1"])])
    run_program(tmp_path / "stopped")  # the first is finished, the second alone is resumed
    assert "2 runs, 1 already finished" in capsys.readouterr().out
    for seed, expected in runs_of(tmp_path / "whole").items():
        assert_same(paths[seed], expected, rel=1e-4)


def test_runs_at_different_updates_follow_one_another(tmp_path, monkeypatch):
    """As after a kill between the checkpoints of two runs."""
    run_program(tmp_path / "whole")
    saved = {}
    for count in (1, 2):
        with monkeypatch.context() as context:
            stop_after(context, count)
            with pytest.raises(SystemExit, match="130"):
                run_program(tmp_path / "stopped")
        saved[count] = tmp_path / f"copy-{count}"
        shutil.copytree(tmp_path / "stopped", saved[count])
    (early,), (late,) = (list(saved[count].glob("adapool/*seed-1/*/checkpoint.pt")) for count in (1, 2))
    shutil.copy(early, late)
    run_program(saved[2])
    for seed, path in runs_of(saved[2]).items():
        assert_same(path, runs_of(tmp_path / "whole")[seed], rel=1e-4)


@posix
@pytest.mark.process
def test_killed_runs_resume_exactly(tmp_path):
    words = ["--seeds", "1", "2", "--", *SMALL, "--total-timesteps", "640", "--checkpoint-interval", "1"]

    def program(folder):
        command = [sys.executable, str(ROOT / "agents" / "many_runs.py"), "--out", str(folder), *words]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    assert program(tmp_path / "whole").wait(120) == 0
    killed = program(tmp_path / "killed")
    while not list((tmp_path / "killed").glob("**/checkpoint.pt")):
        time.sleep(0.01)
        assert killed.poll() is None
    killed.kill()
    killed.wait()
    assert program(tmp_path / "killed").wait(120) == 0
    for seed, path in runs_of(tmp_path / "killed").items():
        assert_same(path, runs_of(tmp_path / "whole")[seed], rel=1e-2)


def test_all_combinations_of_values_are_trained(tmp_path, capsys):
    vary = ["--vary", "learning_rate=0.01,0.001", "num_noise=0,2"]
    many_runs.main(["--out", str(tmp_path), "--agents", "avgpool", "maxpool", "--seeds", "5", *vary, "--", *SMALL])
    assert "8 runs, 0 already finished" in capsys.readouterr().out
    paths = list(tmp_path.glob("*/*/seed-5/*/summary.json"))
    found = {(path.parts[-5], *map(str, combination(path))) for path in paths}
    rates, noise = ("0.01", "0.001"), ("[0]", "[2]")
    assert found == {(agent, rate, n) for agent in ("avgpool", "maxpool") for rate in rates for n in noise}
    assert {path.parts[-4] for path in paths} == {
        f"learning-rate-{rate}_num-noise-{n}" for rate in rates for n in (0, 2)
    }


@pytest.mark.parametrize("content", ["null", "5", "{}", "[]", '"abc"', '["x"]', "[[]]", '[[{"a": 1}]]', "no json"])
def test_a_file_without_commands_is_refused(content, tmp_path):
    (tmp_path / "commands.json").write_text(content)
    with pytest.raises(SystemExit, match=r"^error: commands='.*commands\.json': expected"):
        many_runs.main(["--commands", str(tmp_path / "commands.json")])


def test_flags_and_tuples_vary(tmp_path):
    args = many_runs.Args(
        out=tmp_path, seeds=(1,), vary=("anneal_lr=True,False", "env_kwargs=num_noise=(0,4),max_steps=5")
    )
    words = [" ".join(command) for command in many_runs.plan(args, [])]
    assert len(words) == 4
    assert sum(" --anneal-lr " in x for x in words) == sum(" --no-anneal-lr " in x for x in words) == 2
    assert sum(" --env-kwargs num_noise=(0,4) " in x for x in words) == 2


def combination(path):
    """Return the varied settings of a finished run."""
    settings = read_summary(path)["settings"]
    return settings["learning_rate"], settings["num_noise"]


def test_runs_of_a_file_with_commands(tmp_path, capsys):
    agent = str(ROOT / "agents" / "ppo_adapool.py")
    commands = [[agent, *SMALL, "--seed", str(seed), "--run-dir", str(tmp_path / str(seed))] for seed in (3, 4)]
    (tmp_path / "commands.json").write_text(json.dumps(commands))
    many_runs.main(["--commands", str(tmp_path / "commands.json"), "--out", str(tmp_path / "out")])
    assert "2 runs, 0 already finished" in capsys.readouterr().out
    assert [read_summary(folder_of(tmp_path / str(seed)) / "summary.json")["seed"] for seed in (3, 4)] == [3, 4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vary", "learning_rate"], r"vary='learning_rate': expected NAME=VALUE,VALUE"),
        (["--vary", "gamma=1", "gamma=0"], r"vary='gamma=0': expected NAME=VALUE,VALUE, each name once"),
        (["--vary", "seed=1,2"], r"--seed: this program sets it itself"),
        (["--", "--run_dir=x"], r"--run-dir: this program sets it itself"),
        (["--", "--no-capture-video"], r"--capture-video: this program sets it itself"),
        (["--seeds"], r"seeds: expected at least one value"),
        (["--", "--env-id", "CartPole-v1"], r"env_id='CartPole-v1': expected an environment of this package"),
        (["--", "--gamma", "2"], r"gamma=2.0: expected a number from 0 to 1"),
        (["--agents", "nopool"], r"agents='nopool': expected the file .*ppo_nopool\.py"),
        (["--commands", "missing.json"], r"missing\.json"),
    ],
)
def test_bad_settings_are_refused_before_a_run_starts(words, message, tmp_path):
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        many_runs.main(["--out", str(tmp_path), *words])
    assert not list(tmp_path.glob("*/*"))


def test_groups_fit_into_memory(tmp_path, monkeypatch):
    (args,) = settings(load_agent("adapool"), tmp_path, "")
    assert max_runs(args) > 100
    assert max_runs(dataclasses.replace(args, num_envs=10**6)) < max_runs(args)
    monkeypatch.setattr(many_runs, "max_runs", lambda _: 2)
    commands = many_runs.plan(many_runs.Args(out=tmp_path, seeds=(1, 2, 3)), SMALL)
    groups, failures = many_runs.group(commands)
    assert [len(members) for _, members in groups] == [2, 1] and not failures


def test_agents_with_other_files_are_other_groups(tmp_path):
    commands = many_runs.plan(many_runs.Args(out=tmp_path, agents=("avgpool", "maxpool"), seeds=(1, 2, 1)), SMALL)
    groups, _ = many_runs.group(commands)
    assert [(module.__name__, len(members)) for module, members in groups] == [("ppo_avgpool", 2), ("ppo_maxpool", 2)]


def other_optimizer(kind, **options):
    def change(module):
        module.make_optimizer = lambda args, agent: kind([flatten(agent)], args.learning_rate, **options)

    return change


def rate_as_epsilon(module):
    module.make_optimizer = lambda args, agent: torch.optim.Adam([flatten(agent)], 0.1, eps=args.learning_rate)


def each_weight(module):
    module.make_optimizer = lambda args, agent: torch.optim.Adam(agent.parameters(), args.learning_rate)


def two_groups(module):
    def make(args, agent):
        groups = [{"params": [flatten(agent)]}, {"params": [torch.nn.Parameter(torch.zeros(3))]}]
        return torch.optim.Adam(groups, args.learning_rate)

    module.make_optimizer = make


def frozen(module):
    class Agent(module.Agent):
        def __init__(self, *given):
            super().__init__(*given)
            self.role.weight.requires_grad_(False)

    module.Agent = Agent


def buffered(module):
    class Agent(module.Agent):
        def __init__(self, *given):
            super().__init__(*given)
            self.register_buffer("scale", torch.ones(()))

    module.Agent = Agent


@pytest.mark.parametrize(
    "change",
    [
        other_optimizer(torch.optim.SGD),
        other_optimizer(torch.optim.AdamW),
        other_optimizer(torch.optim.Adam, weight_decay=0.1),
        other_optimizer(torch.optim.Adam, amsgrad=True),
        other_optimizer(torch.optim.Adam, maximize=True),
        rate_as_epsilon,
        each_weight,
        two_groups,
        frozen,
        buffered,
    ],
)
def test_an_agent_that_would_learn_otherwise_is_refused(change, tmp_path):
    module = load_agent("adapool")
    change(module)
    finished, failures = many_runs.run_group(module, settings(module, tmp_path, "", "--seed 2 --learning-rate 0.1"))
    assert len(finished) <= 1 and failures  # the first run alone may fit
    assert all(re.match("make_optimizer: expected Adam|Agent: expected no buffers", reason) for _, reason in failures)
    assert not list(tmp_path.glob(f"{1}/*"))


def copied(folder, before, after):
    """Copy an agent's file with a change, as `mine`."""
    text = (ROOT / "agents" / "ppo_adapool.py").read_text(encoding="utf-8")
    assert before in text
    (folder / "ppo_mine.py").write_text(text.replace(before, after), encoding="utf-8")
    return ["--agents-dir", str(folder), "--agents", "mine"]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("for _ in range(args.update_epochs)", "for _ in range(1)", "expected update of ppo_adapool.py"),
        ("state, *prepare(", "state, *prepare (", "expected collect of ppo_adapool.py"),
        ("def adapt(", "def adapted(", "expected a function adapt"),
    ],
)
def test_a_copy_whose_loop_is_replaced_is_refused(before, after, message, tmp_path):
    with pytest.raises(SystemExit, match=f"^error: .*ppo_mine.py: {message}"):
        run_program(tmp_path / "runs", *copied(tmp_path, before, after))


def test_a_copy_with_another_loss_and_setting_trains(tmp_path, capsys):
    (tmp_path / "presets.toml").write_text((ROOT / "agents" / "presets.toml").read_text())
    words = copied(tmp_path, "loss = policy_loss +", "loss = 0.5 * policy_loss +")
    run_program(tmp_path / "runs", *words)
    module = many_runs.load_file("ppo_mine", tmp_path)
    expected = alone(module, tmp_path / "alone", "--seed 1")
    assert_same(runs_of(tmp_path / "runs")["seed-1"], expected, rel=1e-4)


def test_runs_of_other_settings_are_not_taken_for_these(tmp_path, monkeypatch):
    run_program(tmp_path)
    for changed in (["--learning-rate", "0.5"], ["--env-id", "noisy_envs/SimpleTag-v0"]):
        with pytest.raises(SystemExit, match=r"^error: (learning_rate=0.5|env_id=.*): the run to resume has"):
            many_runs.main(["--out", str(tmp_path), "--seeds", "1", "2", "3", "--", *SMALL, *changed])
    assert len(runs_of(tmp_path)) == 2


def test_a_run_that_cannot_be_resumed_fails_alone(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as context:
        stop_after(context, 1)
        with pytest.raises(SystemExit, match="130"):
            run_program(tmp_path)
    paths = runs_of(tmp_path)
    (paths["seed-1"] / "checkpoint.pt").write_bytes(b"damaged")
    with pytest.raises(SystemExit, match=r"^1 of 3 runs failed:\n.*seed-1.*checkpoint\.pt is not a checkpoint"):
        many_runs.main(["--out", str(tmp_path), "--seeds", "1", "2", "3", "--", *SMALL])
    assert [path.parts[-3] for path in sorted(tmp_path.glob("*/*/*/summary.json"))] == ["seed-2", "seed-3"]


def test_a_locked_run_fails_alone(tmp_path, monkeypatch):
    with monkeypatch.context() as context:
        stop_after(context, 1)
        with pytest.raises(SystemExit, match="130"):
            run_program(tmp_path)
    with lock_folder(runs_of(tmp_path)["seed-1"]), pytest.raises(SystemExit, match=r"^1 of 2 runs failed:\n.*seed-1"):
        run_program(tmp_path)
    run_program(tmp_path)


def test_a_second_program_in_a_folder_is_refused(tmp_path):
    with lock_folder(tmp_path), pytest.raises(SystemExit, match=r"^error: .*in use by"):
        run_program(tmp_path)


def test_a_signal_between_checkpoint_and_next_update_loses_nothing(tmp_path, monkeypatch):
    start = Run.start_update

    def signalled(run):
        if run.updates == 1 and run.args.seed == 1:
            signal.raise_signal(signal.SIGTERM)  # after the checkpoint of update 1
        start(run)

    monkeypatch.setattr(Run, "start_update", signalled)
    with pytest.raises(SystemExit, match="130"):
        run_program(tmp_path)
    for path in runs_of(tmp_path).values():
        assert load_checkpoint(path / "checkpoint.pt")["progress"][1] == len(metrics(path)) == 2


def test_threads_and_determinism_are_those_of_the_settings(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(torch, "set_num_threads", called.append)
    monkeypatch.setattr(many_runs, "use_deterministic", called.append)
    run_program(tmp_path / "a")
    many_runs.main(
        ["--out", str(tmp_path / "b"), "--seeds", "1", "--", *SMALL, "--num-threads", "2", "--torch-deterministic"]
    )
    assert called == [1, False, 2, True]
