"""The benchmark of speed runs, with whatever peers are installed; it never fails on a timing."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
QUICK = ["one world", "NumPy", "NumPy, copy=False", "NumPy, all agents observe", "torch", "levels drawn, not steps"]
QUICK += ["one world, in contact all the time", "Gymnasium's SyncVectorEnv", "Gymnasium's AsyncVectorEnv"]


def benchmark(*words):
    command = [sys.executable, BENCHMARKS / "env_speed.py", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True)


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
        (["--worlds", "0"], "must be at least 1"),
        (["--threads", "100000"], "100000: must be at most"),
        (["--out", "speed.jpg"], "speed.jpg: must end in .png"),
    ],
)
def test_wrong_words_are_refused(words, told):
    done = benchmark(*words)
    assert done.returncode == 2 and told in done.stderr


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
    with pytest.raises(ValueError, match="must hold a table"):
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
