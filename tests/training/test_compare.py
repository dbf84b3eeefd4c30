"""Comparing heads: what is missing runs, and no more; what is killed resumes; what fails is told; numbers by hand."""

import errno
import importlib.util
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

from noisy_envs.training import checkpoint
from noisy_envs.training.files import lock_folder
from noisy_envs.training.plots import COLOURS, HEAD_NAMES, Panel, plot_panels
from noisy_envs.training.statistics import drop, estimate, iqm, mean_curve

ROOT = Path(__file__).parents[2]
NOISY, CLEAN = (f"noisy_envs/SimpleCentroid-{sizes}-v0" for sizes in ("1v1v30", "1v31v0"))
TRAINED = ["--total-timesteps", "256"]

# Stands for an agent: its interface, in milliseconds. `trouble` is how seed 2 behaves: it can "fail" at once, "stop" as
# if asked to, "kill" itself after its checkpoint, "orphan" itself by killing its parent, kill "both", have a score of
# "nan"; all seeds can "wait" for Ctrl-C.
AGENT = """
import json, os, pathlib, signal, sys, time
def parse(words):
    if "--total-timestep" in words:
        print("╭─ Unrecognized ─╮\\n│ Unrecognized options: --total-timestep │\\n│ For help, run --help │\\n╰───╯")
        sys.exit(2)
    if "1" in words[words.index("--no-gif"):]:
        raise ValueError("total_timesteps=1: too few")
def main():
    words = sys.argv[1:]
    option = dict(zip(words[::2], words[1::2])) if "--no-gif" not in words else {
        name: words[words.index(name) + 1] for name in words if name.startswith("--") and name != "--no-gif"}
    trouble = os.environ.get("TROUBLE")
    with open(os.environ["CALLS"], "a") as calls:
        calls.write(" ".join(words) + "\\n")
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
    level, seed = option["--env-id"], int(option["--seed"])
    score = round((0.9 if "1v31v0" in level else 0.3) + 0.01 * seed**2, 6)
    rows = "".join(f"{64 * step},{seed * step - 5 - ('avgpool' in sys.argv[0])}\\n" for step in range(1, 4 + seed))
    (folder / "metrics.csv").write_text("global_step,charts/episodic_return\\n" + rows)
    changed = option.get("--options")
    summary = {
        "options": {changed.partition("=")[0]: json.loads(changed.partition("=")[2])} if changed else {},
        "return_random": -7.0 if changed else -2.0, "return_oracle": -1.0,
        "env_id": level, "agent": pathlib.Path(__file__).stem, "seed": seed,
        "score": None if trouble == "nan" and seed == 2 else score, "versions": {"commit": "abc" + str(seed)},
        "settings": {"total_timesteps": int(option.get("--total-timesteps", 64)), "dropout": 0.0, "anneal_lr": True,
                     "num_noise": [int(option["--num-noise"])] if "--num-noise" in option else []},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
if __name__ == "__main__":
    main()
"""


def load(name):
    """Import an agent's neighbour under its own name."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "agents" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


compare = load("compare")


class Field:
    """A folder with agents, where comparisons are run and calls of agents are counted."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.out, self.monkeypatch = folder, folder / "out", monkeypatch
        for head in HEAD_NAMES:
            (folder / f"ppo_{head}.py").write_text(AGENT)
        monkeypatch.setenv("CALLS", str(folder / "calls"))
        monkeypatch.delenv("TROUBLE", raising=False)

    def trouble(self, kind):
        self.monkeypatch.setenv("TROUBLE", kind)

    def words(self, *words, heads=("avgpool", "adapool"), levels=(NOISY, CLEAN), seeds="123", passed=TRAINED):
        own = ["--out", str(self.out), "--agents-dir", str(self.folder), "--heads", *heads, "--env-ids", *levels]
        return [*own, "--seeds", *seeds, *words, "--", *passed]

    def run(self, *words, **options):
        compare.main(self.words(*words, **options))

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


def test_every_cell_runs_once_and_a_second_call_runs_nothing(field, capsys):
    field.run("--jobs", "2")
    calls = field.calls()
    assert len(calls) == len(set(calls)) == 2 * 2 * 3
    assert all(call.endswith(" --no-gif --total-timesteps 256") for call in calls)
    for name in ("SimpleCentroid-1v1v30-v0", "SimpleCentroid-1v31v0-v0"):
        for seed in (1, 2, 3):
            assert len(list((field.out / name / "adapool" / f"seed-{seed}").glob("*/summary.json"))) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "12 runs, 0 of them done before" and "[12/12]" in shown[-2] and "score 0." in shown[-2]
    assert shown[1].startswith("starting SimpleCentroid-1v31v0-v0 avgpool seed ") and shown[1].endswith("/log.txt")
    assert sum(line.startswith("starting ") for line in shown) == 12
    before = (field.out / "results.json").read_text()
    field.run("--jobs", "2")
    assert not field.calls() and (field.out / "results.json").read_text() == before
    assert "12 runs, 12 of them done before" in capsys.readouterr().out
    field.run(seeds="1234")
    assert len(field.calls()) == 4


def test_a_full_disk_ends_with_one_line_that_names_the_file(field, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "write_atomically", full)
    told = r"^error: \[Errno 28\] .*command\.json'; once that is mended, go on with the same command$"
    with pytest.raises(SystemExit, match=told):
        field.run()
    assert not field.calls()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_summary_of_something_else_is_named(field, text):
    field.run(seeds="1", heads=("avgpool",), levels=(CLEAN,))
    (path,) = field.out.glob("*/*/*/*/summary.json")
    path.write_text(text)
    with pytest.raises(SystemExit, match=rf"^error: {re.escape(str(path))} is (damaged|not what this program wrote)"):
        field.run(seeds="1", heads=("avgpool",), levels=(CLEAN,))


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


@pytest.mark.parametrize(("seeds", "told"), [("1", "0.910, n = 1"), ("12", "0.925, n = 2")])
def test_fewer_than_three_seeds_have_no_interval(field, seeds, told):
    field.run(seeds=seeds)
    table = (field.out / "table.md").read_text()
    assert re.search(rf"\| AdaPool \| {told} \| 0\.3\d\d, n = {len(seeds)} \| 0\.600 \|", table)
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
    field.run(heads=["adapool"], levels=[CLEAN])
    calls = field.calls()
    (folder,) = (field.out / "SimpleCentroid-1v31v0-v0" / "adapool" / "seed-2").glob("run-*")
    assert len(calls) == 4 and [call for call in calls if "--resume" in call] == [f"--resume {folder}"]
    assert not field.results()["missing"]


def test_a_failing_run_is_told_and_the_others_go_on(field, capsys):
    field.trouble("fail")
    with pytest.raises(SystemExit) as error:
        field.run(heads=["maxpool"], levels=[CLEAN])
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
    field.run(heads=["maxpool"], levels=[CLEAN])
    assert len(field.calls()) == 1 and not field.results()["missing"]


def test_a_run_that_somebody_stopped_has_not_failed(field, capsys):
    field.trouble("stop")
    with pytest.raises(SystemExit, match=r"1 of 3 runs failed or were stopped:\n.* seed 2: stopped, see "):
        field.run(heads=["adapool"], levels=[CLEAN])
    assert "FAILED" not in capsys.readouterr().out and len(field.calls()) == 3


def test_a_score_of_nan_is_named(field):
    field.trouble("nan")
    field.run(heads=["adapool"], levels=[CLEAN])
    assert "adapool seed 2: its score is NaN" in (field.out / "table.md").read_text()
    assert field.results()["scores"]["adapool"]["SimpleCentroid-1v31v0-v0"].keys() == {"1", "3"}


@pytest.mark.parametrize(
    ("passed", "told"),
    [
        (["--total-timesteps", "512"], r"total_timesteps 512 \(there 256\)"),
        ([*TRAINED, "--dropout", "0.1"], r"dropout 0.1 \(there by default\)"),
        ([], r"total_timesteps by default \(there 256\); give `-- --total-timesteps 256`"),
    ],
    ids=["other", "more", "none"],
)
def test_other_words_for_the_same_folder_are_refused(field, passed, told):
    field.run(heads=["adapool"], levels=[CLEAN], seeds="1")
    field.calls()
    with pytest.raises(SystemExit, match=told):
        field.run(passed=passed)
    assert not field.calls()


@pytest.mark.parametrize(
    ("passed", "told"),
    [
        (["--total-timestep", "256"], "'--total-timestep 256' after --: Unrecognized options: --total-timestep"),
        (["--total-timesteps", "1"], "'--total-timesteps 1' after --: total_timesteps=1: too few"),
    ],
    ids=["unknown", "refused"],
)
def test_words_that_no_agent_takes_are_refused_before_any_run(field, passed, told):
    with pytest.raises(SystemExit) as error:
        field.run(passed=passed)
    assert error.value.code == f"error: {told}" and not field.calls() and not field.out.exists()


def test_words_that_no_run_took_bind_nobody(field, capsys):
    field.trouble("fail")
    with pytest.raises(SystemExit, match="failed"):
        field.run(seeds="2", heads=["adapool"], levels=[CLEAN], passed=["--dropout", "0"])
    assert "see curves.png" not in capsys.readouterr().out  # there are none
    field.monkeypatch.delenv("TROUBLE")
    field.run(seeds="2", heads=["adapool"], levels=[CLEAN])


@pytest.mark.parametrize(
    ("name", "value"),
    [("total_timesteps", 512), ("seed", 3), ("env_id", NOISY), ("num_noise", [4]), ("agent", "ppo_x")],
)
def test_a_run_of_other_settings_is_refused(field, name, value):
    field.run(heads=["adapool"], levels=[CLEAN], seeds="1")
    (path,) = field.out.glob("*/*/*/*/summary.json")
    summary = json.loads(path.read_text())
    (summary if name in summary else summary["settings"])[name] = value
    path.write_text(json.dumps(summary))
    with pytest.raises(SystemExit, match=re.escape(f"seed-1: its run has {name}={value}")):
        field.run(heads=["adapool"], levels=[CLEAN], seeds="1")


def test_words_agree_with_what_they_mean():
    assert compare.settings(["--a-b", "1e-3", "--no-c", "--d", "--e-f=x-y"]) == {
        "a_b": "1e-3", "c": "False", "d": "True", "e_f": "x-y",
    }  # fmt: skip
    same = [("1e-3", 0.001), ("256", 256), ("True", True), ("False", False), ("inf", None), ("paper", "paper")]
    other = [("1e-3", 0.01), ("True", False), ("1", True), ("None", 28), ("28", None), ("paper", "fast")]
    assert all(compare.agrees(*pair) for pair in same) and not any(compare.agrees(*pair) for pair in other)


def test_words_that_change_the_game_change_what_is_drawn_with_it(field):
    field.run(heads=["avgpool"], levels=[NOISY], seeds="1", passed=[*TRAINED, "--options", "num_signal=29"])
    assert field.results()["snr"] == {"SimpleCentroid-1v1v30-v0": 0.5}  # 30 of 60; without the words 2 of 32
    cells = compare.plan(compare.Args(out=field.out, env_ids=(NOISY,), seeds=(1,), heads=("avgpool",)))
    (panel,) = compare.panels(cells)
    assert (panel.random, panel.oracle) == (-7, -1) and panel.title.endswith("SNR 0.5")


def test_a_run_that_cannot_begin_is_told_at_once_and_the_others_go_on(field, capsys):
    folder = field.out / "SimpleCentroid-1v1v30-v0" / "avgpool"
    folder.mkdir(parents=True)
    (folder / "seed-1").write_text("no folder")
    with pytest.raises(SystemExit):
        field.run(heads=["avgpool"], levels=[NOISY], seeds="12")
    told = capsys.readouterr().out
    assert told.index("avgpool seed 1: FAILED") < told.index("avgpool seed 2: score")
    assert (field.out / "table.md").is_file()


def test_noise_levels_of_one_environment(field):
    field.run("--num-noise", "28", "0", levels=["noisy_envs/SimpleTag-v0"], heads=["adapool"], seeds="1")
    assert list(field.results()["snr"]) == ["SimpleTag-v0-noise-0", "SimpleTag-v0-noise-28"]  # falling signal
    assert field.results()["snr"]["SimpleTag-v0-noise-28"] == 4 / 32
    assert sorted(call.split(" --seed")[0] for call in field.calls()) == [
        f"--env-id noisy_envs/SimpleTag-v0 --num-noise {noise}" for noise in (0, 28)
    ]


def test_levels_of_noise_start_alike(field):
    centroid, own = "noisy_envs/SimpleCentroid-v0", ["--options", "spread=2.0"]
    for noise in (0, 28):
        words = compare.Level(centroid, noise).words
        assert words(TRAINED) == [*TRAINED, *own]
        assert words(["--options", "a=1", "b=2", *TRAINED]) == [*own, "a=1", "b=2", *TRAINED]
        assert words([*TRAINED, "--options=a=1"]) == [*TRAINED, *own, "a=1"]
        assert words(["--options", "spread=3"]) == ["--options", "spread=3"]
    for level in (compare.Level(centroid, None), compare.Level("noisy_envs/SimpleTag-v0", 4)):
        assert level.words(TRAINED) == TRAINED and "spread" not in level.options
    few, many = (compare.Level(centroid, noise).references() for noise in (0, 60))
    assert few == many
    field.run("--num-noise", "28", "0", levels=[centroid], heads=["adapool"], seeds="1")
    assert all("--options spread=2.0" in call for call in field.calls())


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
    apart, wide = drop(few, many), estimate(few)
    assert apart.low < 3 < apart.high and apart.high - apart.low > 1.2 * (wide.high - wide.low)


def test_the_figure_shows_every_head_and_draws_again_what_is_there(field):
    image = pytest.importorskip("PIL.Image")
    field.run()
    field.calls()
    (field.out / "curves.png").unlink()
    field.run("--draw-only", passed=[])
    assert not field.calls()
    with image.open(field.out / "curves.png") as picture:
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    for head, colour in COLOURS.items():
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert ((pixels == wanted).all(axis=1).sum() > 100) == (head in ("avgpool", "adapool")), head


def test_folders_of_other_words_are_drawn_beside(field):
    other = field.folder / "other"
    field.run("--out", str(other), levels=[NOISY], passed=[])
    with pytest.raises(SystemExit, match="holds no runs"):
        field.run("--draw-only", "--beside", str(other), levels=[NOISY], passed=[])
    field.run()
    field.run("--draw-only", "--beside", str(other), levels=[NOISY], passed=[])
    assert (field.out / "beside.png").is_file()
    args, _ = compare.parse(field.words("--draw-only", "--beside", str(other), levels=[NOISY], passed=[]))
    panels = compare.panels_beside(args)
    assert [panel.title.split("\n")[1] for panel in panels] == ["total_timesteps 256", "total_timesteps 64"]
    assert [set(panel.curves) for panel in panels] == 2 * [{"avgpool", "adapool"}]
    with pytest.raises(SystemExit, match=f"beside={other}: holds none"):
        field.run("--draw-only", "--beside", str(other), levels=[CLEAN], passed=[])


@posix
@pytest.mark.parametrize(
    ("words", "heads"),
    [(["--jobs", "3"], ["maxpool", "adapool"]), (["--ray", "--cpus-per-run", "0.1"], ["adapool"])],
    ids=["here", "ray"],
)
def test_ctrl_c_lets_the_runs_save_and_the_same_command_goes_on(field, words, heads):
    if "--ray" in words:
        pytest.importorskip("ray")
    field.trouble("wait")
    command = [sys.executable, ROOT / "agents" / "compare.py", *field.words(*words, levels=[CLEAN], heads=heads)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 20
    while len(list(field.out.glob("*/*/*/*/ready"))) < 3 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal does
    try:
        assert "stopped; go on with the same command" in process.communicate(timeout=20)[1]
    finally:
        process.kill()
    assert process.returncode == 130 and len(list(field.out.glob("*/*/*/*/saved"))) == 2
    assert len(field.calls()) == 3  # no other was begun, none again
    field.monkeypatch.delenv("TROUBLE")
    field.run(levels=[CLEAN], heads=heads)
    calls = field.calls()
    assert len(calls) == 3 * len(heads) and sum("--resume" in call for call in calls) == 3


def test_a_second_comparison_of_one_folder_is_refused(field):
    field.out.mkdir()
    with lock_folder(field.out), pytest.raises(SystemExit, match=f"out is in use by another process, {os.getpid()};"):
        field.run()
    assert not field.calls() and not (field.out / "command.json").exists()
    field.run(heads=["adapool"], levels=[CLEAN], seeds="1")
    with lock_folder(field.out):
        field.run("--draw-only", heads=["adapool"], levels=[CLEAN], seeds="1")  # which writes but what it draws
    assert len(field.calls()) == 1


@posix
def test_no_run_is_taken_up_while_its_agent_lives_on(field, capsys):
    field.trouble("orphan")
    command = [
        sys.executable,
        ROOT / "agents" / "compare.py",
        *field.words(heads=["adapool"], levels=[CLEAN], seeds="2"),
    ]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    field.run(heads=["adapool"], levels=[CLEAN], seeds="2")
    assert len(field.calls()) == 1  # it was waited for, and not run again
    assert capsys.readouterr().out.count("waiting for the agent that runs on there") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--jobs", "0"], "jobs=0: must be from 1"),
        (["--seeds"], "seeds: must be at least one"),
        (["--seeds", "-1"], "seeds=-1: must be from 0"),
        (["--env-ids", "noisy_envs/Nothing-v0"], "noisy_envs/Nothing-v0"),
        (["--env-ids", "SimpleTag-v0"], "did you mean 'noisy_envs/SimpleTag-v0'? must be one that "),
        (["--env-ids", CLEAN, "noisy_envs/SimpleTag-v0"], "must be of one game"),
        (["--num-noise", "3"], "must come with one id"),
        (["--env-ids", "CartPole-v1", "Pendulum-v1"], "must be one, whose noise --num-noise sets"),
        (["--address", "auto"], "must come with --ray"),
        (["--gpus-per-run", "nan"], "gpus_per_run=nan"),
        (["--gpus-per-run", "1.5"], "gpus_per_run=1.5: must be whole"),
        (["--agents-dir", "/nowhere"], "there is no /nowhere/ppo_avgpool.py"),
        (["--draw-only"], "holds no runs"),
        (["--beside", "/nowhere"], "beside=/nowhere: must come with --draw-only"),
        (["--", "--seed", "3"], "--seed after --"),
        (["--", "--evaluate", "runs"], "--evaluate after --"),
        (["--", "--help"], "--help after --"),
        (["--", "3"], "'3' after --"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_bad_settings_end_with_one_line(field, words, told):
    before = ["--out", str(field.out), "--agents-dir", str(field.folder)]
    with pytest.raises(SystemExit) as error:
        compare.main([*before, *words])
    assert told in error.value.code and "\n" not in error.value.code
    assert not field.out.exists()


def test_without_ray_it_is_asked_for(field, monkeypatch):
    monkeypatch.setattr(compare, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install -e '\.\[ray\]'"):
        field.run("--ray")


def test_a_real_agent(field):
    pytest.importorskip("torch")
    words = ["--total-timesteps", "256", "--num-envs", "4", "--num-steps", "16", "--minibatch-size", "32"]
    words += ["--eval-episodes", "2"]
    own = ["--out", str(field.out), "--heads", "adapool", "--seeds", "1", "--env-ids", "noisy_envs/SimpleCentroid-v0"]
    compare.main([*own, "--", *words])
    log = field.out / "SimpleCentroid-v0" / "adapool" / "seed-1" / "log.txt"
    (path,) = log.parent.glob("*/summary.json")
    summary = json.loads(path.read_text())
    assert "score" in log.read_text() and summary["settings"]["total_timesteps"] == 256
    assert field.results()["scores"]["adapool"]["SimpleCentroid-v0"] == {"1": summary["score"]}
    compare.main([*own, "--", *words])  # its own settings agree with the words


def test_ray_takes_up_a_lost_run(field):
    pytest.importorskip("ray")
    field.trouble("both")  # seed 2 kills the worker that runs it, and itself
    words = field.words("--ray", "--cpus-per-run", "0.5", heads=["adapool"], levels=[CLEAN])
    done = subprocess.run(
        [sys.executable, ROOT / "agents" / "compare.py", *words], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[3/3]" in done.stdout and not field.results()["missing"]
    assert [call.startswith("--resume") for call in sorted(field.calls())] == [False] * 3 + [True]


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("training\nerror: seed=-1: must be from 0\n", "error: seed=-1: must be from 0"),
        ("╭─ Unrecognized ─╮\n│ --bogus, 1     │\n│ for help: -h   │\n╰────────────────╯\n", "--bogus, 1"),
        ("", "no word"),
    ],
    ids=["line", "box", "nothing"],
)
def test_a_failures_reason_is_its_telling_line(log, told):
    assert compare.reason(log) == told


def test_a_level_of_another_environment():
    pytest.importorskip("torch")
    few, many = (compare.Level("CartPole-v1", noise) for noise in (0, 5))
    assert (few.name, many.name) == ("CartPole-v1-noise-0", "CartPole-v1-noise-5")
    assert few.snr() == 1.0 and many.snr() == pytest.approx(0.5)
    assert few.references() == many.references() and many.references().oracle == 475
