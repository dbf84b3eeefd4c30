"""Comparing agents: only missing runs start, killed ones resume, failures are reported, numbers match those by hand."""

import dataclasses
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cases import posix

pytest.importorskip("tyro")
pytest.importorskip("matplotlib")

from noisy_envs.rendering.agent_policy import load_file
from noisy_envs.training import checkpoint
from noisy_envs.training.files import lock_folder
from noisy_envs.training.plots import COLOURS, HEAD_NAMES, Panel, plot_panels
from noisy_envs.training.statistics import difference, estimate, iqm, mean_curve, paired_difference

ROOT = Path(__file__).parents[2]
NOISY, CLEAN = (f"noisy_envs/SimpleCentroid-{sizes}-v0" for sizes in ("1v1v30", "1v31v0"))
TRAINED = ["--total-timesteps", "256"]

# A fake agent: the command line of a real one, in milliseconds. `trouble` is how seed 2 behaves: it can "fail" at once,
# "stop" as if by Ctrl-C, "kill" itself after its checkpoint, "orphan" itself by killing its parent, kill "both", have a
# score of "nan"; all seeds can "wait" for Ctrl-C.
AGENT = """
import json, os, pathlib, signal, sys, time
def main():
    args = sys.argv[1:]
    option = dict(zip(args[::2], args[1::2])) if "--no-capture-video" not in args else {
        name: args[args.index(name) + 1] for name in args if name.startswith("--") and name != "--no-capture-video"}
    trouble = os.environ.get("TROUBLE")
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(" ".join(args) + "\\n")
    if "--resume" in option:
        folder = pathlib.Path(option["--resume"])
        option = json.loads((folder / "checkpoint.pt").read_text())
        trouble = "nan" if trouble == "nan" else None
    else:
        folder = pathlib.Path(option["--run-dir"]) / ("run-" + str(time.time_ns()))
        if trouble == "stop" and option["--seed"] == "2":
            sys.exit(130)
        if trouble == "fail" and option["--seed"] == "2":
            sys.exit("no more sand in the hourglass")
        folder.mkdir(parents=True)
        (folder / "checkpoint.pt").write_text(json.dumps(option))
    if option["--seed"] == "2" and trouble == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if option["--seed"] == "2" and trouble in ("orphan", "both"):
        os.kill(os.getppid(), signal.SIGKILL)
        if trouble == "both":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
    if trouble == "wait":
        if option["--seed"] == "3":  # as one that has not come to its handler yet
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        (folder / "ready").touch()
        try:
            time.sleep(30)
        except KeyboardInterrupt:
            time.sleep(0.5)  # in which a second Ctrl-C would end it
            (folder / "saved").touch()
            sys.exit("saved")
    env_id, seed = option["--env-id"], int(option["--seed"])
    score = round((0.9 if "1v31v0" in env_id else 0.3) + 0.01 * seed**2, 6)
    rows = "".join(f"{64 * step},{seed * step - 5 - ('avgpool' in sys.argv[0])}\\n" for step in range(1, 4 + seed))
    (folder / "metrics.csv").write_text("global_step,charts/episodic_return\\n" + rows)
    changed = option.get("--env-kwargs")
    summary = {
        "env_kwargs": {changed.partition("=")[0]: json.loads(changed.partition("=")[2])} if changed else {},
        "return_random": -7.0 if changed else -2.0, "return_oracle": -1.0,
        "env_id": env_id, "agent": pathlib.Path(__file__).stem, "seed": seed,
        "score": None if trouble == "nan" and seed == 2 else score, "versions": {"commit": "abc" + str(seed)},
        "settings": {"total_timesteps": int(option.get("--total-timesteps", 64)), "dropout": 0.0, "anneal_lr": True,
                     "num_noise": [int(option["--num-noise"])] if "--num-noise" in option else []},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
if __name__ == "__main__":
    main()
"""


compare = load_file("compare", ROOT / "agents")


class Field:
    """A folder with agents, where comparisons are run and calls of agents are counted."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.out, self.monkeypatch = folder, folder / "out", monkeypatch
        for head in HEAD_NAMES:
            (folder / f"ppo_{head}.py").write_text(AGENT)
        monkeypatch.setenv("CALLS", str(folder / "calls"))
        monkeypatch.delenv("TROUBLE", raising=False)
        monkeypatch.setattr(compare, "check_agent_args", lambda job: None)  # takes seconds, for it imports torch

    def trouble(self, kind):
        self.monkeypatch.setenv("TROUBLE", kind)

    def arguments(self, *args, agents=("avgpool", "adapool"), env_ids=(NOISY, CLEAN), seeds="123", passed=TRAINED):
        fixed = ["--out", str(self.out), "--agents-dir", str(self.folder), "--agents", *agents, "--env-ids", *env_ids]
        return [*fixed, "--seeds", *seeds, *args, "--", *passed]

    def run(self, *args, **options):
        compare.main(self.arguments(*args, **options))

    def calls(self):
        path = self.folder / "calls"
        found = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return found

    def results(self):
        return json.loads((self.out / "results.json").read_text())


@pytest.fixture
def field(tmp_path, monkeypatch):
    return Field(tmp_path, monkeypatch)


def test_every_job_runs_once_and_a_second_call_runs_nothing(field, capsys):
    field.run("--jobs", "2")
    calls = field.calls()
    assert len(calls) == len(set(calls)) == 2 * 2 * 3
    assert all(call.endswith(" --no-capture-video --total-timesteps 256") for call in calls)
    for name in ("SimpleCentroid-1v1v30-v0", "SimpleCentroid-1v31v0-v0"):
        for seed in (1, 2, 3):
            assert len(list((field.out / name / "adapool" / f"seed-{seed}").glob("*/summary.json"))) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "12 runs, 0 already finished" and "[12/12]" in shown[-2] and "score 0." in shown[-2]
    assert shown[1].startswith("starting SimpleCentroid-1v31v0-v0 avgpool seed ") and shown[1].endswith("/log.txt")
    assert sum(line.startswith("starting ") for line in shown) == 12
    before = (field.out / "results.json").read_text()
    field.run("--jobs", "2")
    assert not field.calls() and (field.out / "results.json").read_text() == before
    assert "12 runs, 12 already finished" in capsys.readouterr().out
    field.run(seeds="1234")
    assert len(field.calls()) == 4


def test_a_full_disk_ends_with_one_line_that_names_the_file(field, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "write_atomically", full)
    message = r"^error: \[Errno 28\] .*command\.json'; once that is fixed, resume with the same command$"
    with pytest.raises(SystemExit, match=message):
        field.run()
    assert not field.calls()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_summary_of_something_else_is_named(field, text):
    field.run(seeds="1", agents=("avgpool",), env_ids=(CLEAN,))
    (path,) = field.out.glob("*/*/*/*/summary.json")
    path.write_text(text)
    with pytest.raises(
        SystemExit, match=rf"^error: {re.escape(str(path))} (is damaged|was not written by this program)"
    ):
        field.run(seeds="1", agents=("avgpool",), env_ids=(CLEAN,))


def test_the_tables_numbers_by_hand(field):
    field.run(seeds="12345")
    found = field.results()
    assert list(found["snr"]) == ["SimpleCentroid-1v31v0-v0", "SimpleCentroid-1v1v30-v0"]
    clean, noisy = (found["iqm"]["adapool"][name] for name in found["snr"])
    assert clean["value"] == pytest.approx(0.9 + (0.04 + 0.09 + 0.16) / 3)  # of 5, the lowest and the highest fall away
    assert noisy["value"] == pytest.approx(0.3 + (0.04 + 0.09 + 0.16) / 3)
    assert noisy["low"] == pytest.approx(0.32) and noisy["low"] < noisy["value"] < noisy["high"] <= 0.3 + 0.25
    fall = found["drop"]["adapool"]
    assert fall["value"] == pytest.approx(0.6) and 0.6 - 0.23 < fall["low"] < 0.55 and 0.65 < fall["high"] < 0.6 + 0.23
    table = (field.out / "table.md").read_text()
    assert f"| AdaPool | {clean['value']:.3f} ({clean['low']:.3f} to {clean['high']:.3f}), n = 5 |" in table
    assert "commit abc1, abc2, abc3, abc4, abc5" in table and "compare.py --out" in table and "-- --total" in table
    assert "Intervals of few seeds" in table and "no score is trimmed" not in table


@pytest.mark.parametrize(("seeds", "cell"), [("1", "0.910, n = 1"), ("12", "0.925, n = 2")])
def test_fewer_than_three_seeds_have_no_interval(field, seeds, cell):
    field.run(seeds=seeds)
    table = (field.out / "table.md").read_text()
    assert re.search(rf"\| AdaPool \| {cell} \| 0\.3\d\d, n = {len(seeds)} \| 0\.600 \|", table)
    assert field.results()["iqm"]["adapool"]["SimpleCentroid-1v31v0-v0"]["low"] is None


def test_a_curve_of_one_point_is_seen(tmp_path):
    image = pytest.importorskip("PIL.Image")
    rows = [{"global_step": 64, "charts/episodic_return": -1.0}]
    plot_panels(tmp_path / "a.png", [Panel("one", -2.0, 0.0, {"adapool": [rows]})])
    with image.open(tmp_path / "a.png") as picture:
        drawn = np.asarray(picture.convert("RGB"))[: -picture.height // 5]  # without the legend
    orange = [int(COLOURS["adapool"][i : i + 2], 16) for i in (1, 3, 5)]
    assert (drawn == orange).all(axis=-1).sum() > 10


def test_curves_that_are_equal_are_both_seen(tmp_path):
    image = pytest.importorskip("PIL.Image")
    rows = [{"global_step": 64.0 * i, "charts/episodic_return": -float(i)} for i in range(9)]
    curves = {head: [rows] for head in COLOURS}
    plot_panels(tmp_path / "a.png", [Panel("one", -9.0, 0.0, curves)])
    with image.open(tmp_path / "a.png") as picture:
        drawn = np.asarray(picture.convert("RGB"))[: -picture.height // 5]  # without the legend
    for color in COLOURS.values():
        near = abs(drawn.astype(int) - [int(color[i : i + 2], 16) for i in (1, 3, 5)]).max(axis=-1) < 60
        assert near.sum() > 100, color


def test_a_killed_run_is_resumed_in_its_folder(field):
    field.trouble("kill")
    field.run(agents=["adapool"], env_ids=[CLEAN])
    calls = field.calls()
    (folder,) = (field.out / "SimpleCentroid-1v31v0-v0" / "adapool" / "seed-2").glob("run-*")
    assert len(calls) == 4 and [call for call in calls if "--resume" in call] == [f"--resume {folder}"]
    assert not field.results()["missing"]


def test_a_failing_run_is_reported_and_the_others_go_on(field, capsys):
    field.trouble("fail")
    with pytest.raises(SystemExit) as error:
        field.run(agents=["maxpool"], env_ids=[CLEAN])
    log = field.out / "SimpleCentroid-1v31v0-v0" / "maxpool" / "seed-2" / "log.txt"
    assert (
        "1 of 3 runs failed" in error.value.code
        and f"exit status 1: no more sand in the hourglass, see {log}" in error.value.code
    )
    assert "no more sand" in log.read_text() and "[1/3] SimpleCentroid-1v31v0-v0 maxpool seed 2" in (
        capsys.readouterr().out
    )
    assert len(field.calls()) == 3
    assert "missing: SimpleCentroid-1v31v0-v0 maxpool seed 2: not finished" in (field.out / "table.md").read_text()
    field.monkeypatch.delenv("TROUBLE")
    field.run(agents=["maxpool"], env_ids=[CLEAN])
    assert len(field.calls()) == 1 and not field.results()["missing"]


def test_a_run_that_somebody_stopped_has_not_failed(field, capsys):
    field.trouble("stop")
    with pytest.raises(SystemExit, match=r"1 of 3 runs failed or were stopped:\n.* seed 2: stopped, see "):
        field.run(agents=["adapool"], env_ids=[CLEAN])
    assert "FAILED" not in capsys.readouterr().out and len(field.calls()) == 3


def test_a_score_of_nan_is_named(field):
    field.trouble("nan")
    field.run(agents=["adapool"], env_ids=[CLEAN])
    assert "adapool seed 2: its score is NaN" in (field.out / "table.md").read_text()
    assert field.results()["scores"]["adapool"]["SimpleCentroid-1v31v0-v0"].keys() == {"1", "3"}


@pytest.mark.parametrize(
    ("passed", "message"),
    [
        (["--total-timesteps", "512"], r"total_timesteps=512: expected 256, as in .*command\.json"),
        ([*TRAINED, "--dropout", "0.1"], r"dropout=0.1: expected the default"),
        ([], r"total_timesteps=the default: expected 256, .*; or give `-- --total-timesteps 256` or another --out"),
    ],
    ids=["other", "more", "none"],
)
def test_other_arguments_for_the_same_folder_are_refused(field, passed, message):
    field.run(agents=["adapool"], env_ids=[CLEAN], seeds="1")
    field.calls()
    with pytest.raises(SystemExit, match=message):
        field.run(passed=passed)
    assert not field.calls()


@pytest.mark.parametrize(
    ("passed", "message"),
    [
        (["--total-timestep", "256"], "'--total-timestep 256' after --: Unrecognized options: --total-timestep"),
        (["--total-timesteps", "1"], "'--total-timesteps 1' after --: total_timesteps=1: expected at least the "),
    ],
    ids=["unknown", "refused"],
)
def test_arguments_that_an_agent_refuses_are_refused_before_any_run(tmp_path, passed, message):
    pytest.importorskip("torch")
    with pytest.raises(SystemExit) as error:
        compare.main(["--out", str(tmp_path / "out"), "--agents", "adapool", "--", *passed])
    assert error.value.code.startswith(f"error: {message}") and "\n" not in error.value.code
    assert not (tmp_path / "out").exists()


def test_arguments_with_which_no_run_started_do_not_count(field, capsys):
    field.trouble("fail")
    with pytest.raises(SystemExit, match="failed"):
        field.run(seeds="2", agents=["adapool"], env_ids=[CLEAN], passed=["--dropout", "0"])
    assert "see curves.png" not in capsys.readouterr().out  # there are none
    field.monkeypatch.delenv("TROUBLE")
    field.run(seeds="2", agents=["adapool"], env_ids=[CLEAN])


@pytest.mark.parametrize(
    ("name", "value"),
    [("total_timesteps", 512), ("seed", 3), ("env_id", NOISY), ("num_noise", [4]), ("agent", "ppo_x")],
)
def test_a_run_of_other_settings_is_refused(field, name, value):
    field.run(agents=["adapool"], env_ids=[CLEAN], seeds="1")
    (path,) = field.out.glob("*/*/*/*/summary.json")
    summary = json.loads(path.read_text())
    (summary if name in summary else summary["settings"])[name] = value
    path.write_text(json.dumps(summary))
    with pytest.raises(
        SystemExit, match=rf"^error: {name}=.*: expected {re.escape(str(value))}, as in .*/seed-1/.*summary\.json"
    ):
        field.run(agents=["adapool"], env_ids=[CLEAN], seeds="1")


def test_arguments_agree_with_what_they_mean():
    assert compare.parse_agent_args(["--a-b", "1e-3", "--no-c", "--d", "--e-f=x-y"]) == {
        "a_b": "1e-3", "c": "False", "d": "True", "e_f": "x-y",
    }  # fmt: skip
    same = [("1e-3", 0.001), ("256", 256), ("True", True), ("False", False), ("inf", None), ("paper", "paper")]
    other = [("1e-3", 0.01), ("True", False), ("1", True), ("None", 28), ("28", None), ("paper", "fast")]
    assert all(compare.means(*pair) for pair in same) and not any(compare.means(*pair) for pair in other)


def test_arguments_that_change_the_game_change_what_is_plotted_with_it(field):
    field.run(agents=["avgpool"], env_ids=[NOISY], seeds="1", passed=[*TRAINED, "--env-kwargs", "num_signal=29"])
    assert field.results()["snr"] == {"SimpleCentroid-1v1v30-v0": 0.5}  # 30 of 60; by the id 2 of 32
    jobs = compare.plan(compare.Args(out=field.out, env_ids=(NOISY,), seeds=(1,), agents=("avgpool",)))
    (panel,) = compare.make_panels(jobs)
    assert (panel.random, panel.oracle) == (-7, -1) and panel.title.endswith("SNR 0.5")


def test_a_run_that_cannot_start_is_reported_at_once_and_the_others_go_on(field, capsys):
    folder = field.out / "SimpleCentroid-1v1v30-v0" / "avgpool"
    folder.mkdir(parents=True)
    (folder / "seed-1").write_text("no folder")
    with pytest.raises(SystemExit):
        field.run(agents=["avgpool"], env_ids=[NOISY], seeds="12")
    output = capsys.readouterr().out
    assert output.index("avgpool seed 1: FAILED") < output.index("avgpool seed 2: score")
    assert (field.out / "table.md").is_file()


def test_noise_levels_of_one_environment(field):
    field.run("--num-noise", "28", "0", env_ids=["noisy_envs/SimpleTag-v0"], agents=["adapool"], seeds="1")
    assert list(field.results()["snr"]) == ["SimpleTag-v0-noise-0", "SimpleTag-v0-noise-28"]  # falling signal
    assert field.results()["snr"]["SimpleTag-v0-noise-28"] == 4 / 32
    assert sorted(call.split(" --seed")[0] for call in field.calls()) == [
        f"--env-id noisy_envs/SimpleTag-v0 --num-noise {noise}" for noise in (0, 28)
    ]


def test_noise_levels_start_alike(field):
    centroid, start = "noisy_envs/SimpleCentroid-v0", ["--env-kwargs", "spread=2.0"]
    for noise in (0, 28):
        agent_args = compare.Setting(centroid, noise).agent_args
        assert agent_args(TRAINED) == [*TRAINED, *start]
        assert agent_args(["--env-kwargs", "a=1", "b=2", *TRAINED]) == [*start, "a=1", "b=2", *TRAINED]
        assert agent_args([*TRAINED, "--env-kwargs=a=1"]) == [*TRAINED, *start, "a=1"]
        assert agent_args(["--env-kwargs", "spread=3"]) == ["--env-kwargs", "spread=3"]
    for setting in (compare.Setting(centroid, None), compare.Setting("noisy_envs/SimpleTag-v0", 4)):
        assert setting.agent_args(TRAINED) == TRAINED and "spread" not in setting.env_kwargs
    few, many = (compare.Setting(centroid, noise).baselines() for noise in (0, 60))
    assert few == many
    field.run("--num-noise", "28", "0", env_ids=[centroid], agents=["adapool"], seeds="1")
    assert all("--env-kwargs spread=2.0" in call for call in field.calls())


def test_curves_are_means_where_all_seeds_have_a_return():
    runs = [
        [
            {"global_step": step, "charts/episodic_return": value}
            for step, value in zip((64, 128, 192), one, strict=False)
        ]
        for one in ([np.nan, 1.0, 2.0], [0.0, 3.0, 6.0], [0.0, 5.0])
    ]
    steps, means, errors = mean_curve(runs)
    assert steps.tolist() == [128] and means.tolist() == [3] and errors == pytest.approx([2 / np.sqrt(3)])
    assert mean_curve(runs[1:2])[2].tolist() == [0, 0, 0]


def test_interquartile_means():
    values = np.array([[9.0, 1, 2, 3, 4, 5, 6, 100], [1, 1, 1, 1, 1, 1, 1, 1]])
    assert iqm(values).tolist() == [4.5, 1]
    assert iqm(np.array([1.0, 2, 6])) == 3
    scipy = pytest.importorskip("scipy.stats")
    for size in range(1, 14):
        values = np.random.default_rng(size).normal(size=size)
        assert iqm(values) == pytest.approx(scipy.trim_mean(values, 0.25))  # rliable's


def test_intervals_are_those_of_the_bootstrap():
    scores = np.random.default_rng(0).normal(size=200)
    low, high = estimate(scores)[1:]
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(1.2 / 200), rel=0.15)  # the asymptotic variance of this mean
    few, many = scores[:100], scores[100:] - 3
    apart, wide = difference((few, many)), estimate(few)
    assert apart.low < 3 < apart.high and apart.high - apart.low > 1.2 * (wide.high - wide.low)


def test_both_scores_of_a_seed_are_resampled_together():
    first, noise = np.random.default_rng(0).normal(size=(2, 20))
    assert paired_difference(first, first - 3) == pytest.approx((3, 3, 3))  # apart they vary by more than 1
    second = first + 0.1 * noise
    order = np.random.default_rng(1).permutation(20)
    together, apart = paired_difference(first, second), paired_difference(first, second[order])
    assert together.value == pytest.approx(apart.value) == difference((first, second)).value
    assert together.low < together.value < together.high
    assert together.high - together.low < 0.3 * (apart.high - apart.low)
    assert np.isnan(paired_difference([1, 2], [3, 4]).low)  # too few
    with pytest.raises(ValueError, match="shorter"):
        paired_difference(first, second[1:])


def test_the_figure_shows_every_agent_and_is_made_again_from_runs_that_exist(field):
    image = pytest.importorskip("PIL.Image")
    field.run()
    field.calls()
    (field.out / "curves.png").unlink()
    field.run("--plot-only", passed=[])
    assert not field.calls()
    with image.open(field.out / "curves.png") as picture:
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    for head, colour in COLOURS.items():
        expected = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert ((pixels == expected).all(axis=1).sum() > 100) == (head in ("avgpool", "adapool")), head


def test_folders_with_other_arguments_are_compared(field):
    other = field.folder / "other"
    field.run("--out", str(other), env_ids=[NOISY], passed=[])
    with pytest.raises(SystemExit, match=f"out={field.out}: expected a folder with runs"):
        field.run("--plot-only", "--compare-with", str(other), env_ids=[NOISY], passed=[])
    field.run()
    field.run("--plot-only", "--compare-with", str(other), env_ids=[NOISY], passed=[])
    assert (field.out / "comparison.png").is_file()
    args, _ = compare.parse(field.arguments("--plot-only", "--compare-with", str(other), env_ids=[NOISY], passed=[]))
    panels = compare.comparison_panels(args)
    assert [panel.title.split("\n")[1] for panel in panels] == ["total_timesteps 256", "total_timesteps 64"]
    assert [set(panel.curves) for panel in panels] == 2 * [{"avgpool", "adapool"}]
    with pytest.raises(SystemExit, match=f"compare_with={other}: expected a folder with runs of these agents"):
        field.run("--plot-only", "--compare-with", str(other), env_ids=[CLEAN], passed=[])


@posix
@pytest.mark.parametrize(
    ("args", "agents"),
    [(["--jobs", "3"], ["maxpool", "adapool"]), (["--ray", "--cpus-per-run", "0.1"], ["adapool"])],
    ids=["here", "ray"],
)
def test_ctrl_c_lets_the_runs_save_and_the_same_command_resumes(field, args, agents):
    if "--ray" in args:
        pytest.importorskip("ray")
    field.trouble("wait")
    command = [
        sys.executable,
        ROOT / "agents" / "compare.py",
        *field.arguments(*args, env_ids=[CLEAN], agents=agents, passed=[]),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 20
    while len(list(field.out.glob("*/*/*/*/ready"))) < 3 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does
    try:
        assert "stopped; resume with the same command" in process.communicate(timeout=20)[1]
    finally:
        process.kill()
    assert process.returncode == 130 and len(list(field.out.glob("*/*/*/*/saved"))) == 2
    assert len(field.calls()) == 3  # no other was begun, none again
    field.monkeypatch.delenv("TROUBLE")
    field.run(env_ids=[CLEAN], agents=agents, passed=[])
    calls = field.calls()
    assert len(calls) == 3 * len(agents) and sum("--resume" in call for call in calls) == 3


def test_a_second_comparison_of_one_folder_is_refused(field):
    field.out.mkdir()
    with lock_folder(field.out), pytest.raises(SystemExit, match=f"out is in use by another process, {os.getpid()};"):
        field.run()
    assert not field.calls() and not (field.out / "command.json").exists()
    field.run(agents=["adapool"], env_ids=[CLEAN], seeds="1")
    with lock_folder(field.out):
        field.run(
            "--plot-only", agents=["adapool"], env_ids=[CLEAN], seeds="1"
        )  # which writes only its figures and table
    assert len(field.calls()) == 1


@posix
def test_no_run_is_taken_up_while_its_agent_lives_on(field, capsys):
    field.trouble("orphan")
    command = [
        sys.executable,
        ROOT / "agents" / "compare.py",
        *field.arguments(agents=["adapool"], env_ids=[CLEAN], seeds="2", passed=[]),
    ]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    field.run(agents=["adapool"], env_ids=[CLEAN], seeds="2", passed=[])
    assert len(field.calls()) == 1  # it was waited for, and not run again
    assert capsys.readouterr().out.count("waiting for a run that outlived its killed parent process") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--jobs", "0"], "jobs=0: expected a number from 1"),
        (["--seeds"], "seeds: expected at least one value"),
        (["--seeds", "-1"], "seeds=-1: expected a number from 0"),
        (["--env-ids", "noisy_envs/Nothing-v0"], "noisy_envs/Nothing-v0"),
        (["--env-ids", "SimpleTag-v0"], "did you mean 'noisy_envs/SimpleTag-v0'? expected an ID that "),
        (["--env-ids", CLEAN, "noisy_envs/SimpleTag-v0"], "expected IDs of one game, got SimpleCentroid and SimpleTag"),
        (["--num-noise", "3"], "num_noise=(3,): expected with one ID"),
        (["--env-ids", "CartPole-v1", "Pendulum-v1"], "expected one ID, with noise levels in --num-noise"),
        (["--address", "auto"], "address='auto': expected together with --ray"),
        (["--gpus-per-run", "nan"], "gpus_per_run=nan"),
        (["--gpus-per-run", "1.5"], "gpus_per_run=1.5: expected a whole number"),
        (["--agents-dir", "/nowhere"], "agents='avgpool': expected the file /nowhere/ppo_avgpool.py"),
        (["--plot-only"], "expected a folder with runs"),
        (["--compare-with", "/nowhere"], "compare_with=/nowhere: expected together with --plot-only"),
        (["--", "--seed", "3"], "--seed after --"),
        (["--", "--evaluate", "runs"], "--evaluate after --"),
        (["--", "--help"], "--help after --"),
        (["--", "3"], "'3' after --"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_bad_settings_end_with_one_line(field, args, message):
    before = ["--out", str(field.out), "--agents-dir", str(field.folder)]
    with pytest.raises(SystemExit) as error:
        compare.main([*before, *args])
    assert message in error.value.code and "\n" not in error.value.code
    assert not field.out.exists()


def test_a_missing_ray_is_named(field, monkeypatch):
    monkeypatch.setattr(compare, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install -e '\.\[ray\]'"):
        field.run("--ray")


@pytest.mark.process
def test_runs_in_one_process(tmp_path, capsys):
    small = "--total-timesteps 128 --num-envs 4 --num-steps 16 --minibatch-size 32 --update-epochs 1 --num-layers 1"
    words = ["--out", str(tmp_path), "--agents", "avgpool", "adapool", "--env-ids", NOISY, "--seeds", "1", "2"]
    words += ["--together", "--", *small.split(), "--eval-episodes", "3", "--no-compile"]
    compare.main(words)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "4 runs, 0 already finished" and shown[1].startswith("starting 4 runs in one process, see ")
    assert [line[:5] for line in shown[2:6]] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    scores = json.loads((tmp_path / "results.json").read_text())["scores"]
    assert {agent: len(by_name["SimpleCentroid-1v1v30-v0"]) for agent, by_name in scores.items()} == {
        "avgpool": 2, "adapool": 2,
    }  # fmt: skip
    compare.main(words)
    assert capsys.readouterr().out.startswith("4 runs, 4 already finished")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-- --device cuda", (True, 4)),
        ("--jobs 2 -- --device=cuda:1 --dropout 0", (True, 2)),
        ("--no-together -- --device cuda", (False, 1)),
        ("--no-together --jobs 3 -- --device cuda", (False, 3)),
        ("-- --device cpu", (False, 1)),
        ("--together", (True, 1)),
        ("-- --device cuda --track", (False, 1)),
        ("-- --device cuda --kernel torch", (False, 1)),
        ("--env-ids CartPole-v1 -- --device cuda", (False, 1)),
        ("--agents-dir MINE -- --device cuda", (False, 1)),
        ("--agents-dir MINE --together -- --device cuda", (True, 4)),
        ("--ray -- --device cuda", (True, 4)),
    ],
)
def test_runs_on_a_gpu_share_processes(words, expected, field, monkeypatch):
    monkeypatch.setattr(compare, "find_spec", lambda name: name)  # Ray need not be installed
    args, _ = compare.parse(words.replace("MINE", str(field.folder)).split())
    assert (args.together, args.jobs) == expected


@pytest.mark.parametrize(("options", "sizes"), [({}, [12]), ({"jobs": 2}, [6, 6]), ({"ray": True}, [3, 3, 3, 3])])
def test_processes_share_the_runs(field, options, sizes):
    args, _ = compare.parse(field.arguments())
    args = dataclasses.replace(args, **options)
    jobs = compare.flatten(compare.plan(args))
    batches = []

    def execute(given):
        batches.extend(given)
        return [compare.JobResult(batch, problem="lost") for batch in given]

    results = list(compare.run_together(jobs, execute, args))
    assert [len(batch.jobs) for batch in batches] == sizes and len({batch.folder for batch in batches}) == len(sizes)
    assert {result.job for result in results} == set(jobs) and {result.problem for result in results} == {"lost"}
    for batch in batches:
        cells = {(job.setting, job.agent) for job in batch.jobs}
        assert len(batch.jobs) == 3 * len(cells)  # all seeds together
        batch.folder.mkdir(parents=True)  # as its lock does
        _, program, option, path = batch.command()
        assert Path(program).name == "many_runs.py" and option == "--commands"
        assert json.loads(Path(path).read_text()) == [job.command()[1:] for job in batch.jobs]


def test_each_run_of_a_process_has_its_own_reason(field):
    args, _ = compare.parse(field.arguments())
    jobs = compare.flatten(compare.plan(args))

    def execute(batches):
        batches[0].folder.mkdir(parents=True)
        log = [f"{jobs[1].folder}/RUN: FAILED, of an earlier try", "$ python agents/many_runs.py"]
        log += [f"{jobs[0].folder}/RUN: FAILED, its loss is not finite", f"{jobs[2].folder}: FAILED, it is locked"]
        (batches[0].folder / "log.txt").write_text("\n".join(log))
        yield compare.JobResult(batches[0], problem="exit status 1")

    problems = [result.problem for result in compare.run_together(jobs, execute, args)]
    assert problems[:4] == ["its loss is not finite", "exit status 1", "it is locked", "exit status 1"]
    jobs[0].folder.mkdir(parents=True)
    assert jobs[0].log == args.out.resolve() / "together" and jobs[1].log == jobs[1].folder / "log.txt"


def test_a_real_agent(field):
    pytest.importorskip("torch")
    agent_args = ["--total-timesteps", "256", "--num-envs", "4", "--num-steps", "16", "--minibatch-size", "32"]
    agent_args += ["--eval-episodes", "2"]
    args = ["--out", str(field.out), "--agents", "adapool", "--seeds", "1", "--env-ids", "noisy_envs/SimpleCentroid-v0"]
    compare.main([*args, "--", *agent_args])
    log = field.out / "SimpleCentroid-v0" / "adapool" / "seed-1" / "log.txt"
    (path,) = log.parent.glob("*/summary.json")
    summary = json.loads(path.read_text())
    assert "score" in log.read_text() and summary["settings"]["total_timesteps"] == 256
    assert field.results()["scores"]["adapool"]["SimpleCentroid-v0"] == {"1": summary["score"]}
    compare.main([*args, "--", *agent_args])  # its own settings agree with the arguments


def test_ray_resumes_a_lost_run(field):
    pytest.importorskip("ray")
    field.trouble("both")  # seed 2 kills the worker that runs it, and itself
    args = field.arguments("--ray", "--cpus-per-run", "0.5", agents=["adapool"], env_ids=[CLEAN], passed=[])
    done = subprocess.run(
        [sys.executable, ROOT / "agents" / "compare.py", *args], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[3/3]" in done.stdout and not field.results()["missing"]
    assert [call.startswith("--resume") for call in sorted(field.calls())] == [False] * 3 + [True]


def test_a_setting_of_another_gymnasium_environment():
    pytest.importorskip("torch")
    few, many = (compare.Setting("CartPole-v1", noise) for noise in (0, 5))
    assert (few.name, many.name) == ("CartPole-v1-noise-0", "CartPole-v1-noise-5")
    assert few.snr() == 1.0 and many.snr() == pytest.approx(0.5)
    assert few.baselines() == many.baselines() and many.baselines().oracle == 475
