"""The benchmark of speed runs, with whatever peers are installed; it never fails on a timing. The soak sees faults."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from cases import slow
from helpers import TINY, load_agent

from noisy_envs.training.process import stop_signals

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
QUICK = ["one world", "NumPy", "NumPy, copy=False", "NumPy, all agents observe", "torch", "levels drawn, not steps"]
QUICK += ["one world, in contact all the time", "Gymnasium's SyncVectorEnv", "Gymnasium's AsyncVectorEnv"]


def benchmark(*words):
    command = [sys.executable, BENCHMARKS / "env_speed.py", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.process
def test_smoke_runs_every_engine(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    peers = ["MPE2", "VMAS, one substep", "JaxMARL"]
    done = benchmark("--smoke", "--out", tmp_path / "speed.png", "--engines", *QUICK, *peers)
    assert done.returncode == 0 and "failed" not in done.stdout, done.stdout + done.stderr
    header, *rows = (tmp_path / "speed.csv").read_text().splitlines()
    assert header == "work,engine,worlds,threads,device,median,least,most"
    assert all(f",{name}," in "\n".join(rows) or f',"{name}",' in "\n".join(rows) for name in QUICK)
    assert done.stdout.count("\n| ") == len(rows) + 1
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--engines", "numpie"], "invalid choice: 'numpie'"),
        (["--works", "tennis"], "invalid choice: 'tennis'"),
        (["--worlds", "0"], "worlds=[0], repeats=5: expected at least 1"),
        (["--threads", "100000"], "threads=100000: expected at most"),
        (["--out", "speed.jpg"], "out='speed.jpg': expected a name that ends in .png"),
    ],
)
def test_wrong_words_are_refused(monkeypatch, capsys, words, told):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from env_speed import main

    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert told in capsys.readouterr().err


@pytest.mark.process
def test_a_row_that_fails_says_why_and_the_others_go_on():
    words = ["--works", "SimpleTag 1v3v4", "--engines", "one world", "NumPy", "--worlds", "1", "8", "--timeout", "0.01"]
    done = benchmark(*words)
    assert done.returncode == 0 and done.stdout.count("failed, took more than 0.01 s") == 2


def test_a_table_that_is_there_is_drawn_again(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(BENCHMARKS)
    from env_speed import main, read_table, table

    results = read_table((BENCHMARKS.parent / "docs" / "speed.md").read_text())
    assert len(results) > 80 and read_table(table(results)) == results
    first = next(result for result in results if result.row.engine == "JaxMARL" and result.row.threads == 2)
    assert first == (("SimpleTag 1v3v28", "JaxMARL", 1, 2, ""), [47877.0])
    main(["--draw", str(BENCHMARKS.parent / "docs" / "speed.md"), "--out", str(tmp_path / "again.png")])
    assert [path.name for path in tmp_path.iterdir()] == ["again.png"]
    with pytest.raises(ValueError, match="expected a table"):
        read_table("# Speed")


def test_ratios_are_to_the_best_peer(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from env_speed import Result, Row, best_peer, table

    row = Row("SimpleTag 1v3v28", "NumPy", 64, 1, "cpu")
    results = [
        Result(row, [100.0, 300.0, 200.0]),
        Result(row._replace(engine="VMAS, one substep"), [50.0]),
        Result(row._replace(engine="JaxMARL", threads=2), [80.0]),
        Result(row._replace(engine="JaxMARL", worlds=4096), [1000.0]),
        Result(row._replace(engine="Gymnasium's SyncVectorEnv"), [150.0]),
        Result(row._replace(worlds=1, engine="one world"), [10.0]),
        Result(row._replace(work="SimpleTag 1v3v4"), [10.0]),
    ]
    peers = [best_peer(result, results) for result in results]
    assert [peer and peer.median for peer in peers] == [80, 80, 80, 1000, 80, 1000, None]
    lines = table(results).splitlines()[2:]
    assert lines[0] == "| SimpleTag 1v3v28 | 64 | NumPy | 1 | 200 | 100% | 2.5 |"
    assert lines[1].endswith("| 50 | 0% |  |") and lines[5].endswith("| 0.0 (its 4,096 worlds) |")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--pooling foo", "pooling='foo': expected one of"),
        ("--steps 0", "steps=0: expected at least 1"),
        ("--num-neighbors", "num_neighbors: expected at least one value"),
        ("--num-neighbors 33", "num_neighbors=33: expected a number from 1 to num_vectors=32"),
    ],
)
def test_supervised_speed_refuses_wrong_settings(monkeypatch, words, told):
    for needed in ("torch", "tyro", "matplotlib"):
        pytest.importorskip(needed)
    monkeypatch.syspath_prepend(BENCHMARKS)
    from supervised_speed import main

    with pytest.raises(ValueError, match=told):
        main(["--num-sets", "100", "--batch-size", "10", *words.split()])


def test_a_gradient_is_timed_on_a_minibatch(monkeypatch):
    for needed in ("torch", "tyro", "tensorboard"):
        pytest.importorskip(needed)
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gradient_speed

    monkeypatch.setattr(gradient_speed, "seconds", lambda run, device: run() is None or 1.0)
    ppo = load_agent("avgpool")
    gradient, rollout, _ = gradient_speed.measure(ppo, gradient_speed.parse(ppo, TINY))
    assert (gradient, rollout) == pytest.approx((1e9 / 32, 1e9 / 64))


def soak(*words):
    command = [sys.executable, BENCHMARKS / "soak.py", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def soak_main(monkeypatch):
    """The soak in this process, whose handlers of signals are put back."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    from soak import main

    handlers = {number: signal.getsignal(number) for number in stop_signals()}
    yield main
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_soak_keeps_its_rows(tmp_path, soak_main, capsys):
    for _ in range(2):  # the second plays nothing
        assert soak_main(["--steps", "9000", "--num-envs", "32", "--out", str(tmp_path)]) == 0
        told, errors = capsys.readouterr()
        assert told.count("| none |") == 3, told
    assert errors == ""
    rows = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert [row["faults"] for row in rows] == [{}, {}, {}] and min(row["steps"] for row in rows) >= 9000
    assert all(row["truncated"] and row["episodes"] == row["truncated"] + row["terminated"] for row in rows)
    assert (tmp_path / "table.md").read_text().count("\n") == 5


@pytest.mark.process
def test_a_soak_is_stopped(tmp_path):
    run = soak("--num-envs", "32", "--out", tmp_path)
    run.stderr.read(1)  # the bar
    run.send_signal(signal.SIGINT)
    told, errors = run.communicate()
    assert run.returncode == 130 and "stopping" in errors and "Traceback" not in errors
    (row,) = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert 0 < row["steps"] < 10**9 and told.count("\n| noisy_envs/") == 1


def test_a_soak_that_is_stopped_before_its_first_step_has_a_row(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from soak import parse, soak

    args = parse(["--num-envs", "2"])
    args.commit = ""
    row = soak("noisy_envs/SimpleTag-v0", args, [2])
    assert 0 < row["steps"] < 1000 and not row["faults"]


@pytest.mark.parametrize("other", [b'{"kills": [], "runs": []}', *map(slow, (b"[1]", b"null", b"{", b"\xff"))])
def test_a_soak_leaves_files_of_others_alone(tmp_path, soak_main, other):
    (tmp_path / "kills.json").write_bytes(other)
    words = ["--steps", "1", "--num-envs", "2", "--env-id", "noisy_envs/SimpleTag-v0", "noisy_envs/BoxWorld-v0"]
    assert soak_main([*words, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "kills.json").read_bytes() == other and len(list(tmp_path.glob("*.json"))) == 3
    assert (tmp_path / "table.md").read_text().count("\n") == 4


SPOILT = {
    "nonzero reward at a reset": lambda t, reward, ended, cut: (reward + (t == 7), ended, cut),
    "end at a reset": lambda t, reward, ended, cut: (reward, ended, cut | (t == 7)),
    "truncated early": lambda t, reward, ended, cut: (reward, ended, cut | (t == 2)),
    "time limit exceeded": lambda t, reward, ended, cut: (reward, ended, cut & (t != 6)),
    "wrong termination": lambda t, reward, ended, cut: (reward, ended | (t == 2), cut),
    "terminated and truncated": lambda t, reward, ended, cut: (reward, ended | (t == 6), cut),
    "reward out of range": lambda t, reward, ended, cut: (reward * (np.nan if t == 2 else 1), ended, cut),
}


@pytest.mark.parametrize("fault", ["none", *SPOILT])
@pytest.mark.parametrize(
    "env_id", ["noisy_envs/SimpleCentroid-v0", "noisy_envs/SimpleTag-v0", "noisy_envs/BoxWorld-v0"]
)
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_soak_sees(env_id, fault, backend, monkeypatch):
    if backend == "torch":
        pytest.importorskip("torch")
    monkeypatch.syspath_prepend(BENCHMARKS)
    from soak import Watch, action_sampler

    envs = gymnasium.make_vec(env_id, 3, max_episode_steps=6, backend=backend)
    envs.reset(seed=0)
    watch, draw = Watch(envs), action_sampler(envs, 0)
    for t in range(1, 10):
        tokens, reward, terminated, truncated, info = envs.step(draw())
        if fault in SPOILT:
            reward, terminated, truncated = SPOILT[fault](t, reward, terminated, truncated)
        watch.see(reward, terminated, truncated)
        watch.look(tokens, info["snr"])
    watch.compare(envs, 0)
    assert watch.played == 24 or fault != "none"
    assert (fault in watch.fault_counts()) if fault != "none" else not watch.fault_counts()
    watch.look(tokens * np.nan, info["snr"] * 0)
    watch.compare(envs, 1)
    counts = watch.fault_counts()
    assert counts["observation outside its space"] == counts["snr out of range"] == counts["seed"] == 3


def test_a_soak_sees_memory_grow(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from soak import MOST_GROWTH, growth

    before = {"rss": 10, "objects": 10, "gpu": 10}
    assert growth(before, before) == {}
    after = {"rss": 11 + MOST_GROWTH, "objects": 1000, "gpu": 11}
    assert growth(before, after) == {"growth of rss": MOST_GROWTH + 1, "growth of objects": 990, "growth of gpu": 1}
