"""The programs of the README, the pages and the docstrings run as they stand, as do the examples."""

import dataclasses
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from cases import GAME_IDS
from helpers import make

import noisy_envs
from noisy_envs.baselines import baseline_returns, play_baseline
from noisy_envs.interfaces.gymnasium_env import TokenEnv
from noisy_envs.registration import GAMES
from noisy_envs.rendering.window import Window
from noisy_envs.training.process import stop_signals

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = {
    f"{path.relative_to(ROOT)}-{number}": block
    for path in [*PAGES, *sorted((ROOT / "noisy_envs").rglob("*.py"))]
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
}
COMMAND = re.compile(r"(?:^|`)python (\w+/[a-z]\w*\.py[^#`\n]*)", re.MULTILINE)
COMMANDS = [command for path in PAGES for command in COMMAND.findall(path.read_text())]
SCRIPTS = sorted({command.split()[0] for command in COMMANDS})


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_program_in_the_text(block, capsys):
    if "torch" in block:
        pytest.importorskip("torch")
    exec(compile(block, "block", "exec"), {"__name__": "block"})
    shown = capsys.readouterr().out.splitlines()
    for printed in re.findall(r"^print\(.*\)  # ([\d(\[].*)$", block, re.MULTILINE):  # what the text says is printed
        assert printed in shown


@pytest.fixture
def handlers():
    """Leave the handlers of signals as they were: programs set their own."""
    before = {number: signal.getsignal(number) for number in stop_signals()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("script", SCRIPTS)
def test_command_in_the_text(script, monkeypatch, capsys, handlers):
    """Every flag that the text gives a program is one of its own."""
    for package in ("torch", "tyro", *(["sklearn"] if script.startswith("supervised") else [])):
        pytest.importorskip(package)
    monkeypatch.syspath_prepend((ROOT / script).parent)
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert not end.value.code
    shown = capsys.readouterr().out
    for command in COMMANDS:
        own, _, _ = command.partition(" -- ")  # what follows is another program's
        if own.split()[0] == script:
            for flag in re.findall(r"--[a-z][a-z-]+", own):
                assert re.search(rf"{flag}\b", shown), command


EXAMPLES = [path.name for path in sorted((ROOT / "examples").glob("*.py")) if path.name != "play.py"]  # that one waits
UNSEEN = {"record_gif.py": ["PIL"], "record_video.py": ["moviepy"]}  # what an example needs and does not itself import
LEARN = ("rllib_ppo.py", "stable_baselines.py", "torch_rollout.py", "torchrl_ppo.py")
OTHER = dict.fromkeys(("rllib_ppo.py", "torchrl_ppo.py"), pytest.mark.filterwarnings("default"))  # warn of themselves
# what lets those that learn for many seconds do no more than begin
SHORT = {"stable_baselines.py": ["noisy_envs/SimpleCentroid-v0", "2048"], "torch_rollout.py": ["--updates", "16"]}
RUNS = [pytest.param(name, words, id=f"{name}-short") for name, words in SHORT.items()]
RUNS += [
    pytest.param(name, [], id=name, marks=pytest.mark.process if name in SHORT else OTHER.get(name, ()))
    for name in EXAMPLES
]


@pytest.mark.parametrize(("name", "words"), RUNS)
def test_example(name, words, monkeypatch, tmp_path, capsys):
    path = ROOT / "examples" / name
    imported = re.findall(r"^(?:import|from) (?!noisy_envs)([\w.]+)", path.read_text(), re.MULTILINE)
    for module in [*imported, *UNSEEN.get(name, [])]:
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), *words])
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))  # examples may add to it
    runpy.run_path(str(path), run_name="__main__")
    if name == "noise_sweep.py":  # noise alone varies
        assert len(set(re.findall(r"random .*", capsys.readouterr().out))) == 1
    if name in LEARN and not words:
        first, *_, last = map(float, re.findall(r"return (-[\d.]+)", capsys.readouterr().out))
        assert last > first + 0.3  # of the 1.5 between random play and the oracle


def test_a_film_of_an_oracle_needs_one(monkeypatch, tmp_path, capsys):
    pytest.importorskip("PIL")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["record_gif.py", "CartPole-v1"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "examples" / "record_gif.py"), run_name="__main__")
    assert "CartPole-v1: expected an ID of this package, whose game has an oracle\n" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_examples_page_lists_every_example():
    row = r"^\| \[(\w+\.py)\]\(\1\) \|.*\| `pip install .*` \|$"
    rows = re.findall(row, (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def test_citations_are_those_of_the_file_for_programs():
    page, cff = ((ROOT / name).read_text() for name in ("docs/citation.md", "CITATION.cff"))
    paper, software = re.findall(r"```bibtex\n(.*?)```", page, re.DOTALL)
    given, family = (re.search(rf"{key}: (.*)", cff)[1] for key in ("given-names", "family-names"))
    assert f"author = {{{family}, {given}}}" in paper
    for key, field in {" title": "title", "collection-title": "booktitle", "year": "year"}.items():
        said = re.search(rf' {key}: "?(.*?)"?$', cff, re.MULTILINE)[1]
        assert f" {field} = {{{said}}}" in paper
    for key in ("title", "version", "license"):
        said = re.search(rf"^{key}: (.*)", cff, re.MULTILINE)[1]
        assert f" {key} = {{{said}}}" in software
    assert re.search(r"^version: (.*)", cff, re.MULTILINE)[1] == noisy_envs.__version__


ARROWS = ("K_UP", "K_DOWN", "K_LEFT", "K_RIGHT")


@pytest.mark.parametrize("env_id", GAME_IDS.values(), ids=list(GAME_IDS))
def test_arrow_keys_play(env_id, dummy_display, monkeypatch, capsys):
    """The oracle's way where the world waits for a key; else two keys are held for five frames, and let go for five."""
    import pygame

    env, taken, frames = make(env_id), [], []
    env.reset(seed=0)
    step = TokenEnv.step
    monkeypatch.setattr(TokenEnv, "step", lambda self, action: (taken.append(action), step(self, action))[1])
    arrows = [getattr(pygame, name) for name in ARROWS]
    if env.game.num_actions == 4:
        expected, ended = [], False
        while not ended:
            expected.append(int(env.game.policy("oracle", env._episode.state, np.zeros((1, 1)))[0, 0]))
            frames += [[(pygame.KEYDOWN, arrows[expected[-1]])], [(pygame.KEYUP, arrows[expected[-1]])]]
            _, _, ended, _, _ = env.step(expected[-1])
        taken.clear()
    else:
        continuous = env.game.continuous_actions
        held = arrows[:3:2] if continuous else arrows[:1]  # up and left, or up
        frames = [[(pygame.KEYDOWN, key) for key in held], *[[]] * 4, [(pygame.KEYUP, key) for key in held], *[[]] * 4]
        expected = [[0, 1, 0, 0, 1]] * 5 + [[0] * 5] * 5 if continuous else [4] * 5 + [0] * 5
    events = iter([*frames, [(pygame.KEYDOWN, pygame.K_ESCAPE)]])
    get = lambda *kinds: [] if kinds else [pygame.event.Event(kind, key=key) for kind, key in next(events)]  # noqa: E731
    monkeypatch.setattr(pygame.event, "get", get)
    monkeypatch.setattr(pygame.time, "wait", lambda milliseconds: None)
    monkeypatch.setattr(sys, "argv", ["play.py", "--env-id", env_id, "--seed", "0"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "examples" / "play.py"), run_name="__main__")
    assert np.array_equal(taken[: len(expected)], expected)
    assert ("return 11.00, solved" in capsys.readouterr().out) == env.game.terminates


def test_closing_the_window_ends_play(dummy_display, monkeypatch):
    import pygame

    shown, show = [], Window.show

    def show_and_close(self, picture):
        if self.opened is not None and len(shown) < 9:  # while a step is being drawn
            pygame.event.post(pygame.event.Event(pygame.WINDOWCLOSE, window=self.opened[0]))
        shown.append(picture)
        show(self, picture)

    monkeypatch.setattr(Window, "show", show_and_close)
    monkeypatch.setattr(sys, "argv", ["play.py", "--env-id", "noisy_envs/SimpleCentroid-v0"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / "play.py"), run_name="__main__")
    assert ended.value.code is None and len(shown) == 2


def test_play_without_a_display_ends_with_one_line():
    hidden = ("SDL_VIDEODRIVER", "DISPLAY", "WAYLAND_DISPLAY")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    words = [sys.executable, ROOT / "examples" / "play.py"]
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=env)
    assert done.returncode == 1 and done.stderr == "error: there is no display for a window\n"


def test_the_first_example_counts_tokens_without_padding(capsys):
    runpy.run_path(str(ROOT / "examples" / "random_agent.py"))
    signal, of, share = re.search(r"(\d+) of (\d+) tokens carry signal: (\S+)", capsys.readouterr().out).groups()
    assert f"{int(signal) / int(of):.2f}" == share


make_pages = runpy.run_path(str(ROOT / "tools" / "make_pages.py"))


def test_pages_are_what_the_docstrings_and_the_registry_say():
    written = {path.name: path.read_text() for path in (ROOT / "docs" / "environments").glob("*.md")}
    assert written == {name: text.rstrip() + "\n" for name, text in make_pages["pages"]().items()}


@pytest.mark.parametrize("env_id", noisy_envs.ENVIRONMENTS)
def test_gallery_shows_every_id(env_id):
    film = ROOT / "docs" / "images" / "gallery" / f"{env_id.partition('/')[2]}.gif"
    assert 0 < film.stat().st_size < 600_000


@pytest.mark.parametrize("game", GAMES.values(), ids=GAMES)
def test_docstring_has_gymnasiums_headings_and_every_option(game):
    headings = "Description, Action Space, Observation Space, Rewards, Starting State, Episode End, Arguments"
    found = [name for name in make_pages["sections"](game) if name != "Noise"]  # not in games without options for it
    assert found == [*headings.split(", "), "Differences", "Version History"]
    missing = dataclasses.make_dataclass(game.__name__, [("unknown", int, 1)], bases=(game,), frozen=True)
    with pytest.raises(ValueError, match="expected the docstring to describe unknown"):
        make_pages["with_table"](make_pages["sections"](game)["Arguments"], missing)


@pytest.mark.parametrize("env_id", noisy_envs.ENVIRONMENTS)
def test_references_are_what_the_table_says(env_id):
    table = json.loads((ROOT / "noisy_envs" / "baseline_returns.json").read_text())
    for name, value in baseline_returns(env_id)._asdict().items():
        error = table["standard_errors"][env_id][name] * math.sqrt(table["episodes"] / 300)
        assert play_baseline(env_id, name, episodes=300, seed=5).mean() == pytest.approx(value, abs=5 * error)


def test_runs_are_drawn_beside_each_other(tmp_path):
    pytest.importorskip("matplotlib")
    words = [sys.executable, ROOT / "tools" / "plot_runs.py", tmp_path / "curves.png"]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("global_step,charts/episodic_return\n64,nan\n128,1.5\n192,2.5\n")
        words.append(f"{name}={tmp_path / name}")
    subprocess.run(words, check=True)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    wrong = subprocess.run([*words, "three=nowhere"], check=False, capture_output=True, text=True)
    assert wrong.returncode == 2 and "runs='three=nowhere': expected LABEL=FOLDER" in wrong.stderr


def test_unknown_id_has_no_references():
    with pytest.raises(KeyError, match="Nothing"):
        baseline_returns("noisy_envs/Nothing-v0")


def test_benchmark_runs():
    pytest.importorskip("torch")
    words = [sys.executable, "benchmarks/env_speed.py", "--help"]
    subprocess.run(words, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_a_gif_keeps_the_scenes_colours_among_many_others(tmp_path):
    from PIL import Image

    from noisy_envs.rendering.video import write_gif

    frame = np.random.default_rng(0).integers(0, 120, (300, 300, 3), dtype=np.uint8)  # halos of many colours
    scene = {(255, 255, 255): slice(0, 1), (52, 83, 103): slice(1, 2), (54, 84, 100): slice(2, 3)}
    for colour, rows in scene.items():
        frame[rows] = colour
    write_gif(tmp_path / "film.gif", [frame, frame], fps=10)
    with Image.open(tmp_path / "film.gif") as film:
        pixels = np.asarray(film.convert("RGB"))
    for colour, rows in scene.items():
        assert (pixels[rows] == colour).all()
