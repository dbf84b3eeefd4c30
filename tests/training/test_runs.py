"""What a run keeps: metrics that outlive a kill, locks that do not, films, score matrices, tracking, intervals."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from cases import posix

from noisy_envs.interfaces.pettingzoo_env import ParallelTokenEnv
from noisy_envs.rendering import renderer, video
from noisy_envs.rendering.video import check_video_path, write_gif, write_video
from noisy_envs.training import plots, statistics, versions
from noisy_envs.training.arguments import parse_arguments
from noisy_envs.training.checkpoint import checkpoint_path, load_checkpoint, only_runs, save_checkpoint, write_summary
from noisy_envs.training.files import lock_folder
from noisy_envs.training.metrics import MetricsLogger, import_wandb, read_metrics, start_wandb
from noisy_envs.training.plots import plot_matrix, plot_scores
from noisy_envs.training.process import check_memory, memory_errors, on_stop_signal, stop_signals
from noisy_envs.training.statistics import bootstrap_interval
from noisy_envs.training.versions import current_commit

NAMES = ("charts/episodic_return", "losses/value")
ROWS = [{"global_step": 64 * i, NAMES[0]: x, NAMES[1]: 0.1234 / i} for i, x in enumerate([np.nan, -1e-7, 2.5, 3.0], 1)]


def frames(count=3, height=15, width=17):
    """Make pictures that grow brighter (height, width, 3)."""
    return [np.full((height, width, 3), 40 * i, np.uint8) for i in range(1, count + 1)]


@pytest.fixture
def no_board(monkeypatch):
    """Spare TensorBoard's files, where many runs are opened."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    writer = SimpleNamespace(add_summary=lambda *_: None)
    board = SimpleNamespace(file_writer=writer, flush=lambda: None, close=lambda: None)
    monkeypatch.setattr(tensorboard, "SummaryWriter", lambda *_, **__: board)


def written(folder, rows=ROWS, **options):
    """Write rows as a run does, and return the file's bytes."""
    metrics = MetricsLogger(folder, NAMES, **options)
    for row in rows:
        metrics.add(row["global_step"], {name: row[name] for name in NAMES})
    metrics.close()
    return metrics.path.read_bytes()


@pytest.mark.usefixtures("no_board")
def test_metrics_cut_at_any_byte_are_read_and_resumed(tmp_path):
    whole = written(tmp_path)
    path = tmp_path / "metrics.csv"
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        expected = ROWS[: max(0, whole[:end].count(b"\n") - 1)]
        np.testing.assert_equal(read_metrics(path), expected)
        again = written(tmp_path, ROWS[len(expected) :], resume_at=64 * len(expected))
        assert again == whole, end


@pytest.mark.usefixtures("no_board")
@pytest.mark.parametrize("kept", range(5))
def test_rows_beyond_the_checkpoint_are_dropped(tmp_path, kept):
    whole = written(tmp_path)
    metrics = MetricsLogger(tmp_path, NAMES, resume_at=64 * kept + 63)
    np.testing.assert_equal(metrics.rows, ROWS[:kept])
    assert metrics.path.read_bytes().splitlines() == whole.splitlines()[: kept + 1]


@pytest.mark.usefixtures("no_board")
@pytest.mark.parametrize(
    "end", ["1,2\n", "1,2,\n", "1,2,x\n", "1,2,3,4\n", "\0\0\0\n", "\n", '1,2,"\n', "\xff\n", "1\r2\n"]
)
def test_a_damaged_line_is_left_out_at_the_end_and_named_elsewhere(tmp_path, end):
    whole = written(tmp_path)
    path = tmp_path / "metrics.csv"
    path.write_bytes(whole + end.encode("latin-1"))
    np.testing.assert_equal(read_metrics(path), ROWS)
    path.write_bytes(whole + end.encode("latin-1") + b"320,1,2\n")
    with pytest.raises(ValueError, match=r"metrics\.csv, line 6: expected 3 numbers"):
        read_metrics(path)


@pytest.mark.usefixtures("no_board")
def test_columns_stay_the_same(tmp_path):
    metrics = MetricsLogger(tmp_path, NAMES)
    for values in ({NAMES[0]: 1.0}, dict.fromkeys([*NAMES, "extra"], 1.0)):
        with pytest.raises(ValueError, match=r"these differ: (extra|losses/value)"):
            metrics.add(64, values)
    assert metrics.rows == read_metrics(metrics.path) == []
    whole = written(tmp_path)
    with pytest.raises(ValueError, match="these differ: losses/new, losses/value"):
        MetricsLogger(tmp_path, (NAMES[0], "losses/new"), resume_at=256)
    assert metrics.path.read_bytes() == whole


def test_tensorboard_gets_all_rows_at_a_checkpoint(tmp_path):
    pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics, before = MetricsLogger(tmp_path, NAMES), time.time()
    for row in ROWS[:2]:
        metrics.add(row["global_step"], {name: row[name] for name in NAMES})
    after = time.time()
    metrics.flush()  # a kill would come here
    events = EventAccumulator(str(tmp_path)).Reload().Scalars(NAMES[1])
    assert [event.step for event in events] == [64, 128] and all(before <= x.wall_time <= after for x in events)
    metrics.close()


def test_tensorboard_forgets_what_is_played_again(tmp_path):
    pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written(tmp_path)
    newer = [{**row, NAMES[1]: -1.0} for row in ROWS[2:3]]
    time.sleep(1)  # files of one second are read in the order of their names, "10" before "9"
    written(tmp_path, newer, resume_at=128)
    found = EventAccumulator(str(tmp_path)).Reload()
    for name, values in zip(NAMES, ([np.nan, -1e-7, 2.5], [0.1234, 0.0617, -1.0]), strict=True):
        assert [event.step for event in found.Scalars(name)] == [64, 128, 192]
        assert [event.value for event in found.Scalars(name)] == pytest.approx(values, nan_ok=True)


def test_a_checkpoint_is_found_in_the_folder_of_a_run_and_in_the_folder_of_the_only_run(tmp_path):
    one, other = (tmp_path / "seed-1" / name / "checkpoint.pt" for name in ("one.5", "other"))
    one.parent.mkdir(parents=True)
    one.touch()
    for given in (one, one.parent, tmp_path / "seed-1"):
        assert checkpoint_path(given) == one
    for given in (tmp_path, tmp_path / "nothing"):
        assert checkpoint_path(given) == given / "checkpoint.pt"
    other.parent.mkdir()
    other.touch()
    with pytest.raises(ValueError, match=r"seed-1 holds several runs, name one of them: one\.5, other"):
        checkpoint_path(tmp_path / "seed-1")
    assert checkpoint_path(other.parent) == other


def test_a_folder_is_locked_until_it_is_released(tmp_path):
    for _ in range(2):
        with lock_folder(tmp_path), pytest.raises(BlockingIOError, match=f"{tmp_path} is in use by another process"):
            lock_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"12 elsewhere.lan\n", ", 12 on elsewhere.lan"),
        (f"12 {socket.gethostname()}\n".encode(), ", 12"),
        (b"12\n", ", 12"),
        (b"", ""),
        (b"12 \x1b[31m", ""),
        (b"\xff" * 999, ""),
    ],
)
def test_a_lock_names_who_holds_it(tmp_path, content, told):
    with lock_folder(tmp_path):
        (tmp_path / ".lock").write_bytes(content)
        with pytest.raises(BlockingIOError) as error:
            lock_folder(tmp_path)
    assert str(error.value) == f"{tmp_path} is in use by another process{told}; wait until that ends, or stop it"


def test_a_lock_dies_with_its_process(tmp_path):
    code = "import sys, pathlib; from noisy_envs.training.files import lock_folder\n"
    code += "with lock_folder(pathlib.Path(sys.argv[1])): print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(BlockingIOError, match=f"in use by another process, {holder.pid}; wait"):
            lock_folder(tmp_path)
        holder.kill()
        holder.wait()
        assert (tmp_path / ".lock").exists()
        with lock_folder(tmp_path):
            pass


def test_a_file_system_without_locks_gives_none(tmp_path, monkeypatch):
    def refuse(_):
        raise OSError("no locks available")

    monkeypatch.setattr("noisy_envs.training.files._lock", refuse)
    with lock_folder(tmp_path) as first, lock_folder(tmp_path) as second:
        assert not first.closed and not second.closed


@pytest.mark.parametrize("name", ["a.gif", "new/folder/a.GIF"])
def test_a_gif_shows_every_frame(tmp_path, name):
    from PIL import Image

    path = tmp_path / name
    write_video(path, frames(), fps=20)
    with Image.open(path) as film:
        assert (film.format, film.n_frames, film.size, film.info["duration"]) == ("GIF", 3, (17, 15), 50)
        film.seek(2)
        assert np.asarray(film.convert("RGB")).max() == 120
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_gif_keeps_the_colours_of_a_scene_among_many_halos(tmp_path):
    from PIL import Image

    env = ParallelTokenEnv("simple_centroid", "rgb_array", "all", num_noise=28)
    env.reset(seed=1)
    generator = np.random.default_rng(0)
    film = [env.render(weights=generator.dirichlet(np.full(32, 0.6))) for _ in range(12)]
    write_gif(tmp_path / "a.gif", film, fps=10)
    with Image.open(tmp_path / "a.gif") as gif:
        for number, frame in enumerate(film):
            gif.seek(number)
            shown = np.asarray(gif.convert("RGB"))
            for color in (renderer.WHITE, renderer.BLACK, renderer.GRID, renderer.GREEN, renderer.BLUE, renderer.RED):
                place = (frame == color).all(axis=-1)
                assert place.sum() > 100 and (shown[place] == color).all(), color
            assert np.abs(shown.astype(int) - frame).mean() < 0.1


@pytest.mark.parametrize(("height", "width"), [(15, 17), (16, 16), (15, 32), (1, 1)])
def test_an_mp4_shows_every_frame_of_any_size(tmp_path, height, width):
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "a.mp4"
    write_video(path, frames(5, height, width), fps=10)
    assert ffmpeg.count_frames_and_secs(path) == (5, pytest.approx(0.5))
    command = [ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", path, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    pixels = np.frombuffer(subprocess.run(command, capture_output=True, check=True).stdout, np.uint8)
    shown = pixels.reshape(5, height + height % 2, width + width % 2, 3).astype(int)
    assert all(abs(frame - 40 * i).max() < 8 for i, frame in enumerate(shown, 1))
    assert [file.name for file in tmp_path.iterdir()] == ["a.mp4"]


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
@pytest.mark.parametrize(
    ("film", "fps", "words"),
    [
        ([], 10, "frames: expected at least one, got none"),
        ([*frames(), *frames(height=16)], 10, r"got uint8 \(16, 17, 3\) as frame 3, \(15, 17, 3\) as frame 0"),
        ([frames()[0] / 255], 10, "uint8 of one shape .* got float64"),
        ([frames()[0][..., :1]], 10, r"got uint8 \(15, 17, 1\)"),
        (frames(), 0, "fps=0: expected 1 to 50"),
        (frames(), 51, "fps=51: expected 1 to 50"),
    ],
)
def test_what_makes_no_video_is_refused_and_leaves_nothing(tmp_path, suffix, film, fps, words):
    with pytest.raises(ValueError, match=words):
        write_video(tmp_path / f"a{suffix}", film, fps)
    assert not list(tmp_path.iterdir())


def test_an_mp4_that_ffmpeg_left_unfinished_is_no_result(tmp_path, monkeypatch):
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    monkeypatch.setattr(ffmpeg, "count_frames_and_secs", lambda _: (2, 0.2))
    with pytest.raises(OSError, match="ffmpeg wrote 2 of 3 frames"):
        write_video(tmp_path / "a.mp4", frames(), fps=10)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_paths_of_videos_are_checked_before_they_are_needed(tmp_path, suffix):
    taken, plain = tmp_path / f"taken{suffix}", tmp_path / "plain"
    for path in (taken, plain):
        path.write_text("mine")
    check_video_path(tmp_path / "new" / "er" / f"a{suffix}")
    refused = [
        (taken, FileExistsError, "taken.* exists"),
        (plain / f"a{suffix}", NotADirectoryError, "plain is not a folder"),
        (plain / "b" / f"a{suffix}", NotADirectoryError, "plain is not a folder"),
        (tmp_path / "a.avi", ValueError, r"a\.avi: expected a file name that ends in \.gif or \.mp4"),
        (tmp_path / suffix, ValueError, "expected a file name that ends in"),
    ]
    for path, error, words in refused:
        for use in (check_video_path, lambda path: write_video(path, frames(), 10)):
            with pytest.raises(error, match=words):
                use(path)
    assert sorted(tmp_path.iterdir()) == [plain, taken] and taken.read_text() == "mine"


def test_a_video_where_nothing_may_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(video.os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(PermissionError, match="no permission to write"):
        check_video_path(tmp_path / "a.gif")


@pytest.mark.parametrize(("suffix", "package"), [(".gif", "pillow"), (".mp4", "imageio-ffmpeg")])
def test_a_video_without_its_writer_is_refused_early(tmp_path, monkeypatch, suffix, package):
    monkeypatch.setattr(video, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=f"pip install {package}$"):
        check_video_path(tmp_path / f"a{suffix}")


def test_a_matrix_sorts_noise_and_tells_runs_of_one_noise_apart_by_seed(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "plot_matrix", lambda path, *parts: drawn.append(parts))

    def rows(*trained):
        names = [Path("runs") / f"run-{i}" for i in range(len(trained))]
        return [
            {"run": str(name), "seed": seed, "env_id": "x", "trained": noise, "evaluated": at} | {"score": noise + at}
            | {"score_95": [noise + at - 1, noise + at + 1]}
            for name, (noise, seed) in zip(names, trained, strict=True) for at in (28, 0)
        ]  # fmt: skip

    plot_scores(tmp_path, rows((28, 1), (4, 2), (4, 1)))
    plot_scores(tmp_path, rows((28, 1), (4, 2)))
    plot_scores(tmp_path, rows((4, 1), (4, 1)))
    values, lows, highs, labels, columns, *_ = drawn[0]
    assert values.tolist() == [[4, 32], [4, 32], [28, 56]] and columns == ["0", "28"]
    assert lows.tolist() == (values - 1).tolist() and highs.tolist() == (values + 1).tolist()
    assert labels == ["4, seed 1", "4, seed 2", "28, seed 1"]
    assert [parts[3] for parts in drawn[1:]] == [["4", "28"], ["4, run-0", "4, run-1"]]


def test_columns_of_a_matrix_ascend_as_numbers(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "plot_matrix", lambda path, *parts: drawn.append(parts))
    row = {"run": "run", "seed": 1, "env_id": "x", "trained": 4, "score": 0.5, "score_95": [0, 1]}
    plot_scores(tmp_path, [{**row, "evaluated": noise} for noise in (28, (2, 9), 4)])
    assert drawn[0][4] == ["(2, 9)", "4", "28"]


def draw_matrix(path, values, spread=0.05, rows=None, columns=None):
    names = [[str(i) for i in range(n)] for n in np.shape(values)]
    lows, highs = np.asarray(values) - spread, np.asarray(values) + spread
    plot_matrix(path, values, lows, highs, rows or names[0], columns or names[1], "title", "training", "evaluation")


@pytest.mark.parametrize(("words", "told"), [([], "1 oracle"), (["solved"], "1 solved")])
def test_a_matrix_tells_what_counts_as_one(tmp_path, monkeypatch, words, told):
    drawn = []
    monkeypatch.setattr(plots, "write_png", lambda path, figure: drawn.append(figure))
    row = {"run": "a", "seed": 1, "env_id": "x", "trained": 4, "evaluated": 4, "score": 0.5, "score_95": [0.4, 0.6]}
    plot_scores(tmp_path / "a.png", [row], *words)
    assert drawn[0].axes[1].get_yticklabels()[-1].get_text() == told


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (4, 4), (10, 6)])
def test_a_matrix_of_any_size_is_drawn(tmp_path, shape):
    from PIL import Image

    draw_matrix(tmp_path / "a.png", np.linspace(-0.2, 1.2, np.prod(shape)).reshape(shape))
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.format == "PNG" and picture.width > 400 and picture.height > 250


def test_a_matrix_tells_its_numbers_in_colours_that_compare(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "write_png", lambda path, figure: drawn.append(figure))
    values = np.array([[0.5, np.nan], [-0.001, 1.234]])
    draw_matrix(tmp_path / "a.png", values, np.array([[0.1, 0.1], [0.02, np.nan]]), ["few", "many"], ["0", "28"])
    axes = drawn[0].axes[0]
    texts = {(text.xy, text.get_text()) for text in axes.texts}
    assert texts == {
        ((0, 0), "0.50"), ((0, 0), "0.40 to 0.60"), ((0, 1), "0.00"), ((0, 1), "-0.02 to 0.02"), ((1, 1), "1.23"),
    }  # fmt: skip
    (image,) = axes.images
    assert image.get_clim() == (0, 1)
    np.testing.assert_array_equal(image.get_array().mask, np.isnan(values))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["few", "many"] and axes.yaxis_inverted()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "28"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("evaluation", "training")


@pytest.mark.parametrize("names", [(["a"], ["b", "c"]), (["a", "b"], ["c"])])
def test_a_matrix_of_other_shape_than_its_names_is_refused(tmp_path, names):
    with pytest.raises(ValueError, match=r"values: expected shape .* got \(2, 2\)"):
        draw_matrix(tmp_path / "a.png", np.ones((2, 2)), 0.1, *names)


class FakeWandb(ModuleType):
    """Weights & Biases as far as a run uses it; it knows nothing but what it was sent."""

    class Error(Exception):
        """As wandb.Error."""

    def __init__(self, starting_step=0):
        super().__init__("wandb")
        self.starting_step, self.started, self.sent, self.summary, self.ended = starting_step, [], [], {}, 0

    def init(self, **options):
        self.started.append(options)
        return self

    def log(self, values, step):
        self.sent.append((step, values))

    def finish(self):
        self.ended += 1


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def track(folder, resume=False):
    config = {"run_dir": Path("runs"), "worst": np.inf, "seed": 1}
    return start_wandb("noise", "a run", config, folder, resume)


@pytest.mark.usefixtures("no_board")
def test_rows_and_results_are_tracked(tmp_path, wandb):
    tracker = track(tmp_path)
    written(tmp_path, tracker=tracker)
    np.testing.assert_equal(wandb.sent, [(r["global_step"], {name: r[name] for name in NAMES}) for r in ROWS])
    assert wandb.ended == 0
    tracker.summarize({"score": 0.5, "score_95": [0.4, np.nan]})
    tracker.close()
    assert wandb.summary == {"score": 0.5, "score_95": [0.4, None]} and wandb.ended == 1
    (options,) = wandb.started
    assert options["config"] == {"run_dir": "runs", "worst": None, "seed": 1}
    assert (options["project"], options["name"], options["dir"], options["resume"]) == (
        "noise",
        "a run",
        tmp_path,
        None,
    )


def test_a_resumed_run_goes_on_with_the_same_id_and_repeats_nothing(tmp_path, wandb):
    for resume in (True, True, False):  # at first there is nothing to go on with
        track(tmp_path, resume)
    first, second, third = (options["id"] for options in wandb.started)
    assert first == second != third and len(first) == 8
    assert [options["resume"] for options in wandb.started] == ["allow", "allow", None]
    wandb.starting_step = 129
    tracker = track(tmp_path, True)
    for row in ROWS:
        tracker.log(row["global_step"], {})
    assert [step for step, _ in wandb.sent] == [192, 256]


def test_tracking_without_its_package_is_refused(tmp_path, monkeypatch):
    for module in (None, ModuleType("wandb")):  # the second is a folder of this name
        monkeypatch.setitem(sys.modules, "wandb", module)
        for use in (import_wandb, lambda: track(tmp_path)):
            with pytest.raises(ValueError, match="pip install wandb") as error:
                use()
            assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_tracking_that_does_not_start_says_why(tmp_path, wandb, monkeypatch):
    def refuse(**_):
        raise wandb.Error("no API key.\nSign in.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ValueError, match=r"did not start: no API key\. Sign in; WANDB_MODE=offline"):
        track(tmp_path)


def test_the_real_package_takes_all_that_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "SILENT": "true", "CONSOLE": "off"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    for resume in (False, True):
        tracker = track(tmp_path, resume)
        tracker.log(64, {"charts/score": np.nan})
        tracker.summarize({"score": 0.5})
        tracker.close()
    (run_id,) = (tmp_path / "wandb_id").read_text().split()
    kept = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert kept and all(name.endswith(run_id) for name in kept)


def test_the_interval_covers_the_mean_as_often_as_it_says():
    generator = np.random.default_rng(0)
    ends = np.array([bootstrap_interval(generator.normal(3, 1, 50), seed, resamples=500) for seed in range(200)])
    assert 0.88 < ((ends[:, 0] < 3) & (ends[:, 1] > 3)).mean() < 0.99
    assert bootstrap_interval(np.arange(9.0), 1) == bootstrap_interval(np.arange(9.0), 1)
    assert bootstrap_interval(np.full(5, 2.0), 0) == (2, 2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, bool])
@pytest.mark.parametrize(("count", "drawn"), [(7, 7), (7, 50), (9, 1000), (50, 10), (9001, 50_000)])
def test_an_interval_is_the_same_however_many_resamples_are_drawn_at_a_time(monkeypatch, dtype, count, drawn):
    monkeypatch.setattr(statistics, "MAX_DRAWS", drawn)
    values = np.random.default_rng(1).normal(3, 5, count).astype(dtype)
    picked = np.random.default_rng(2).integers(0, count, (101, count))
    expected = np.quantile(values[picked].mean(axis=1), [0.25, 0.75])
    assert bootstrap_interval(values, 2, 0.5, 101) == tuple(expected)


def test_an_interval_of_many_values_needs_little_memory():
    tracemalloc.start()
    try:
        bootstrap_interval(np.arange(20_000.0), 0)
        assert tracemalloc.get_traced_memory()[1] < 2**27  # all at a time would take five times as much
    finally:
        tracemalloc.stop()


def test_one_value_has_no_interval_and_bad_ones_are_refused():
    assert np.isnan(bootstrap_interval(np.array([1.0]), 0)).all()
    for values in ([], [1.0, np.nan], [np.inf, 1.0], [[1.0, 2.0]], 1.0, [np.nan]):
        with pytest.raises(ValueError, match=r"values: expected shape \(n,\), all finite, got"):
            bootstrap_interval(np.array(values), 0)


def test_the_commit_is_that_of_the_repository_that_holds_the_code(tmp_path, monkeypatch):
    monkeypatch.delenv("NOISY_ENVS_COMMIT", raising=False)
    monkeypatch.setattr(versions, "__file__", str(tmp_path / "site-packages" / "versions.py"))
    (tmp_path / "site-packages").mkdir()
    for name in ("theirs.py", "site-packages/versions.py"):
        (tmp_path / name).write_text("")

    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    assert current_commit.__wrapped__() == "unknown (not a git checkout)"  # as installed from a wheel
    git("init")
    git("add", "theirs.py")
    git("commit", "-m", "theirs")
    assert current_commit.__wrapped__().startswith("unknown (")
    git("add", ".")
    git("commit", "-m", "ours")
    assert len(current_commit.__wrapped__()) == 12


GITS = {
    "no commit": ("echo 'fatal: bad revision' >&2; exit 128", "fatal: bad revision; set NOISY_ENVS_COMMIT"),
    "another owner": (
        "echo \"fatal: detected dubious ownership in repository at '/x'\" >&2; exit 128",
        "git config --global --add safe.directory",
    ),
}


@posix
@pytest.mark.parametrize("kind", [*GITS, "no git"])
def test_a_checkout_whose_commit_git_does_not_tell_says_why_once(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("NOISY_ENVS_COMMIT", raising=False)
    monkeypatch.setattr(versions, "__file__", str(tmp_path / "noisy_envs" / "training" / "versions.py"))
    for folder in (".git", "noisy_envs/training", "bin"):
        (tmp_path / folder).mkdir(parents=True)
    script, told = GITS.get(kind, ("", "git is not installed"))
    if script:
        (tmp_path / "bin" / "git").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    current_commit.cache_clear()
    try:
        assert {current_commit(), current_commit()} == {current_commit()} and current_commit().startswith("unknown (")
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and told in error
    finally:
        current_commit.cache_clear()


@dataclasses.dataclass
class Flags:
    """Settings with a flag."""

    gif: bool = True
    """a flag"""
    anneal_lr: bool = False
    """another"""
    out: Path = Path("x")
    """a folder"""
    evaluate: tuple[Path, ...] = ()
    """several"""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--gif", "False"], "--gif False: expected the flag alone, --gif or --no-gif"),
        (["--no-gif", "1"], "--no-gif 1: expected"),
        (["--gif=no"], "--gif no: expected"),
        (["--gif", "maybe", "--out", "a"], "--gif maybe: expected"),
        (["--out", "a\0"], "out='a\\x00': expected a path in UTF-8"),
        (["--out", "a", "--anneal_lr", "true"], "--anneal-lr true: expected the flag alone, --anneal-lr or --no-ann"),
        (["--out", "a\udcff"], "out='a\\udcff': expected a path in UTF-8"),
        (["--evaluate", "a", "b\udcff"], "evaluate='b\\udcff': expected a path in UTF-8"),
    ],
)
def test_a_flag_takes_no_value_and_a_path_is_text(words, told):
    pytest.importorskip("tyro")
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
        parse_arguments(Flags, words, Flags())


def test_arguments_are_read_as_they_stand():
    pytest.importorskip("tyro")
    found = parse_arguments(Flags, ["--no-gif", "--out", "a b'\"\n", "--evaluate", "no", "1"], Flags(anneal_lr=True))
    assert found == Flags(False, True, Path("a b'\"\n"), (Path("no"), Path("1")))


def test_folders_that_are_no_runs_are_passed_over_and_named(tmp_path, capsys):
    paths = [tmp_path / name for name in ("evaluation__1", "run", "file.pt", "summary.json")]
    for path in paths[:2]:
        path.mkdir()
    (paths[1] / "checkpoint.pt").touch()
    assert only_runs(paths) == paths[1:]
    told = capsys.readouterr().err
    assert str(paths[0]) in told and str(paths[1]) not in told
    assert only_runs(paths[:1]) == paths[:1] and not capsys.readouterr().err
    (paths[0] / "metrics.csv").touch()  # a run that lost its checkpoint
    assert only_runs(paths) == paths


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 1 TiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory: 8 bytes"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        OverflowError("int too large to convert to float"),
        RuntimeError("Storage size calculation overflowed with sizes=[1]"),
    ],
)
def test_too_little_memory_ends_in_a_line(error):
    def fail():
        raise error

    with pytest.raises(SystemExit, match=r"^error: not enough memory: (?!\[)[^\n]*; choose fewer"):
        memory_errors()(fail)()


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="Windows grants what there is")
def test_numbers_that_memory_cannot_hold_are_told(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 2**20, "SC_PAGE_SIZE": 2**12}.get)  # 4 GiB
    check_memory({"num_envs": 2**30}, "cpu")
    with pytest.raises(ValueError, match=r"^not enough memory: num_envs need at least 4\.0 GiB, cpu has 4\.0 GiB$"):
        check_memory({"num_envs": 2**30 + 1}, "cpu")


def test_another_error_of_torch_stays():
    with pytest.raises(RuntimeError, match="illegal memory access"), memory_errors():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@posix
def test_a_folder_too_deep_for_a_runs_files_is_refused_at_once(tmp_path):
    folder = tmp_path
    while len(str(folder)) < 4000:
        folder /= "d" * min(200, 4000 - len(str(folder)))
    folder.mkdir(parents=True)
    with pytest.raises(OSError, match="File name too long"):
        lock_folder(folder)


@pytest.mark.usefixtures("no_board")
def test_metrics_that_vanish_are_not_begun_again(tmp_path):
    metrics = MetricsLogger(tmp_path, NAMES)
    metrics.path.unlink()
    with pytest.raises(FileNotFoundError, match=r"metrics\.csv"):
        metrics.add(64, dict.fromkeys(NAMES, 0.0))


@posix
def test_the_signal_of_slurm_stops_too():
    assert signal.SIGUSR1 in stop_signals()


def test_handlers_are_set_in_the_main_thread_alone_and_restored():
    def handlers():
        return {number: signal.getsignal(number) for number in stop_signals()}

    before, called, inside = handlers(), [], []
    with on_stop_signal(lambda number, _: called.append(number), once=True):
        assert not set(handlers().values()) & set(before.values())
        signal.raise_signal(signal.SIGTERM)
        assert called == [signal.SIGTERM] and handlers() == before
    with on_stop_signal(lambda number, _: called.append(number)):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert len(called) == 3 and handlers() == before

    def elsewhere():
        with on_stop_signal(print):
            inside.append(handlers())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert inside == [before]


def test_a_summary_is_json_whatever_it_holds(tmp_path):
    content = {"a": np.nan, "b": [0.5, -np.inf], "c": {"d": Path("x"), "e": (1, np.inf)}}
    write_summary(tmp_path / "a.json", content)

    def refuse(word):
        raise AssertionError(word)

    found = json.loads((tmp_path / "a.json").read_text(), parse_constant=refuse)
    assert found == {"a": None, "b": [0.5, None], "c": {"d": "x", "e": [1, None]}}


def test_a_compressed_checkpoint_is_refused_before_it_is_unpacked(tmp_path):
    """As torch writes none: a few kilobytes of zeros could fill the memory."""
    torch = pytest.importorskip("torch")
    save_checkpoint(tmp_path / "plain.pt", {"weights": torch.zeros(10**6)})
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as plain,
        zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    with pytest.raises(ValueError, match=r"small\.pt is not a checkpoint"):
        load_checkpoint(tmp_path / "small.pt")
    assert load_checkpoint(tmp_path / "plain.pt")["weights"].shape == (10**6,)
