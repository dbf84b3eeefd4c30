"""The benchmark of speed runs, with whatever peers are installed; it never fails on a timing. The soak sees faults."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from cases import slow
from helpers import TINY, load_agent, train_tiny

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
    import start_speed

    def one_second(run, device, repeats=1):
        run()
        return 1.0

    monkeypatch.setattr(start_speed, "seconds", one_second)
    ppo = load_agent("avgpool")
    parts = start_speed.measure(ppo, start_speed.parse(ppo, TINY))
    assert (parts["gradient, ns per sample"], parts["rollout, ns per sample"]) == pytest.approx((1e9 / 32, 1e9 / 64))
    assert all(parts[name] == 1 for name in ("environments", "kernels", "first rollout", "first gradient"))


@pytest.fixture
def learning_speed(monkeypatch, tmp_path):
    """The program, and its arguments for sizes that a CPU can do."""
    for needed in ("torch", "tyro", "tensorboard"):
        pytest.importorskip(needed)
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.syspath_prepend(BENCHMARKS.parent / "tests" / "nn")
    import learning_speed

    folders = ["--out", str(tmp_path / "out.json"), "--runs-dir", str(tmp_path / "runs")]
    return learning_speed, ["--tiny", "--device", "cpu", *folders, "--rows"]


def read_rows(folder):
    return json.loads((folder / "out.json").read_text())


@pytest.mark.process
def test_every_row_of_the_learning_speed_without_kernels(learning_speed, tmp_path, capsys):
    program, words = learning_speed
    rows = ["errors", "one-run", "many-1m", "learn", "start"]
    assert program.main([*words, *rows, "--networks", "1"]) == 0, capsys.readouterr().out
    found = read_rows(tmp_path)
    assert list(found) == rows and all(row["done"] and row["wall"] > 0 for row in found.values())
    assert found["one-run"]["warm"]["score"] == found["one-run"]["cold"]["score"]
    many = found["many-1m"]
    assert (many["runs"], many["not finished or failed"], many["steps"]) == (4, 0, 4 * 128)
    assert many["steps/s of learning"] > many["steps/s of all"]
    assert found["learn"]["difference"][0] == pytest.approx(0, abs=1e-6)  # runs together, and alone
    assert found["start"]["cold"]["first gradient"] > 0


def test_a_row_that_is_stopped_goes_on_and_is_kept_when_done(learning_speed, tmp_path, monkeypatch, capsys):
    program, words = learning_speed
    calls = []

    def stop_twice(row):
        calls.append(row)
        row.results["steps"] = 1000
        if len(calls) < 3:
            raise program.Stopped

    monkeypatch.setitem(program.ROWS, "many-4m", stop_twice)
    assert [program.main([*words, "many-4m"]) for _ in range(4)] == [1, 1, 0, 0]
    row = read_rows(tmp_path)["many-4m"]
    assert len(calls) == len(row["seconds"]) == 3 and row["wall"] == pytest.approx(sum(row["seconds"]))
    assert row["steps/s of all"] == pytest.approx(1000 / row["wall"])
    assert "in 3 calls" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"many-4m has .*; take another file"):
        program.main([*words, "many-4m", "--kernel", "torch"])


def test_a_row_that_fails_lets_the_others_go_on(learning_speed, tmp_path, monkeypatch, capsys):
    program, words = learning_speed
    monkeypatch.setitem(program.ROWS, "learn", lambda row: 1 / 0)
    monkeypatch.setitem(program.ROWS, "start", lambda row: None)
    assert program.main([*words, "learn", "start"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert [row["done"] for row in read_rows(tmp_path).values()] == [False, True]


@pytest.mark.process
def test_runs_are_asked_to_stop_at_the_time_limit(learning_speed, tmp_path, capsys):
    program, _ = learning_speed
    row = program.Row(None, program.time.monotonic() + program.GRACE + 1.5, {})
    row = row._replace(args=program.argparse.Namespace(runs_dir=tmp_path))
    script = tmp_path / "script.py"
    text = "import signal, sys, time\n"
    text += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # shells let background jobs ignore it
    text += "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('saved'); sys.exit(130)\n"
    script.write_text(text)
    with pytest.raises(program.Stopped):
        row.run("sleep", [script])
    assert (tmp_path / "sleep.log").read_text() == "saved\n"
    script.write_text("import noisy_envs; raise SystemExit('error: wrong')")
    with pytest.raises(RuntimeError, match="exit status 1: error: wrong"):
        row._replace(deadline=row.deadline + 60).run("fails", [script])


def test_operations_of_a_network_are_counted(learning_speed):
    from fused_check import SIZES, limits, problem_of

    found = {name: limits(problem_of(size, 1, 3)) for name, size in SIZES.items()}
    gelus = 3 * 32 * 32 + 32 * 8 + 4 * 32  # hidden units, embeddings, actor and critic
    assert found["centroid, AvgPool"]["exponentials"] == 2 * (3 * 8 * 32**2 + gelus)
    assert found["centroid, AdaPool"]["exponentials"] == 2 * (3 * 8 * 32**2 + 8 * 32 + gelus)
    padded, full = (found[f"box world, {n} tokens, AdaPool"]["exponentials"] for n in (8, 50))
    assert padded < full < 2 * (6 * 6 * 50**2 + 6 * 50 + 6 * 50 * 24 + 50 * 6 + 128)


def test_trained_weights_are_compared_with_the_kernels(learning_speed, tmp_path, monkeypatch, capsys):
    if not shutil.which("g++"):
        pytest.skip("needs g++, which compiles the emulated kernels")
    import fused_check
    import torch
    from fused_emulation import emulate

    monkeypatch.setattr(fused_check, "DEVICE", torch.device("cpu"))
    sizes = ["--embed-dim", "3", "--num-heads", "3", "--feedforward-dim", "12", "--num-layers", "1"]
    _, run = train_tiny(load_agent("maxpool"), tmp_path / "runs", *sizes)
    (tmp_path / "kernels").mkdir()
    emulate(monkeypatch, tmp_path / "kernels")
    chosen = fused_check.choose_lanes
    monkeypatch.setattr(fused_check.fused, "choose_lanes", lambda *given: dataclasses.replace(chosen(*given), warps=1))
    worst, failed = fused_check.check_all([fused_check.trained_problem(run, 0.1, 5)])
    assert 0 < worst < 2e-5 and failed == 0, capsys.readouterr().out


def test_jax_computes_the_gradient_of_the_agents(learning_speed):
    pytest.importorskip("jax")
    import fused_check
    import jax_gradient

    problem = fused_check.problem_of(fused_check.SIZES["centroid, AdaPool"], 1, 16)
    assert jax_gradient.error(problem) < 1e-5 and len(jax_gradient.nanoseconds(problem, 2, 1)) == 2


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
