"""The README's programs and the examples run as they stand."""

import dataclasses
import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from conftest import GAMES, make

import noisy_envs
from noisy_envs.reference import play_reference, reference_returns
from noisy_envs.registry import CORES
from noisy_envs.shells.single import TokenEnv

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_program(block, capsys):
    if "torch" in block:
        pytest.importorskip("torch")
    exec(compile(block, "README.md", "exec"), {})
    shown = capsys.readouterr().out.splitlines()
    for printed in re.findall(r"^print\(.*\)  # ([\d(].*)$", block, re.MULTILINE):  # what the README says is printed
        assert printed in shown


EXAMPLES = [path.name for path in sorted((ROOT / "examples").glob("*.py")) if path.name != "play.py"]  # that one waits
UNSEEN = {"record_gif.py": ["PIL"], "record_video.py": ["moviepy"]}  # what an example needs and does not itself import
LEARN = ("rllib_ppo.py", "stable_baselines.py", "torch_rollout.py", "torchrl_ppo.py")
FOREIGN = dict.fromkeys(("rllib_ppo.py", "torchrl_ppo.py"), pytest.mark.filterwarnings("default"))  # warn of themselves


@pytest.mark.parametrize("name", [pytest.param(name, marks=FOREIGN.get(name, ())) for name in EXAMPLES])
def test_example(name, monkeypatch, tmp_path, capsys):
    path = ROOT / "examples" / name
    imported = re.findall(r"^(?:import|from) (?!noisy_envs)([\w.]+)", path.read_text(), re.MULTILINE)
    for module in [*imported, *UNSEEN.get(name, [])]:
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))  # examples may add to it
    runpy.run_path(str(path), run_name="__main__")
    if name in LEARN:
        first, *_, last = map(float, re.findall(r"return (-[\d.]+)", capsys.readouterr().out))
        assert last > first + 0.3  # of the 1.5 between random play and the oracle


def test_readme_lists_every_example():
    row = r"^\| \[(\w+\.py)\]\(examples/\1\) \|.*\| `pip install .*` \|$"
    rows = re.findall(row, (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))


ARROWS = ("K_UP", "K_DOWN", "K_LEFT", "K_RIGHT")


@pytest.mark.parametrize("env_id", GAMES.values(), ids=list(GAMES))
def test_arrow_keys_play(env_id, dummy_display, monkeypatch, capsys):
    """The oracle's way where the world waits for a key; else two keys are held for five frames, and let go for five."""
    import pygame

    env, taken, frames = make(env_id), [], []
    env.reset(seed=0)
    step = TokenEnv.step
    monkeypatch.setattr(TokenEnv, "step", lambda self, action: (taken.append(action), step(self, action))[1])
    arrows = [getattr(pygame, name) for name in ARROWS]
    if env.core.num_actions == 4:
        expected, ended = [], False
        while not ended:
            expected.append(int(env.core.policy("oracle", env._episode.state, np.zeros((1, 1)))[0, 0]))
            frames += [[(pygame.KEYDOWN, arrows[expected[-1]])], [(pygame.KEYUP, arrows[expected[-1]])]]
            _, _, ended, _, _ = env.step(expected[-1])
        taken.clear()
    else:
        continuous = env.core.continuous_actions
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
    assert ("return 11.00, solved" in capsys.readouterr().out) == env.core.terminates


def test_readme_names_every_id_option_and_reference():
    text = (ROOT / "README.md").read_text()
    for env_id in noisy_envs.ENVIRONMENTS:
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{env_id}`")]
        for value in reference_returns(env_id):
            assert f"{value:.3f}".replace("-", "−") in row
    for core in CORES.values():
        for option in (field.name for field in dataclasses.fields(core)):
            assert f"`{option}`" in text


@pytest.mark.parametrize("env_id", noisy_envs.ENVIRONMENTS)
def test_references_are_what_the_table_says(env_id):
    table = json.loads((ROOT / "noisy_envs" / "reference_returns.json").read_text())
    for name, value in reference_returns(env_id)._asdict().items():
        error = table["standard_errors"][env_id][name] * math.sqrt(table["episodes"] / 300)
        assert play_reference(env_id, name, episodes=300, seed=5).mean() == pytest.approx(value, abs=5 * error)


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
    assert wrong.returncode == 2 and "'three=nowhere' must be LABEL=FOLDER" in wrong.stderr


def test_unknown_id_has_no_references():
    with pytest.raises(KeyError, match="Nothing"):
        reference_returns("noisy_envs/Nothing-v0")


def test_benchmark_runs():
    pytest.importorskip("torch")
    words = [sys.executable, "benchmarks/env_speed.py", "--help"]
    subprocess.run(words, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_a_gif_keeps_the_scenes_colours_among_many_others(tmp_path):
    from PIL import Image

    from noisy_envs.pictures import write_gif

    frame = np.random.default_rng(0).integers(0, 120, (300, 300, 3), dtype=np.uint8)  # halos of many colours
    scene = {(255, 255, 255): slice(0, 1), (52, 83, 103): slice(1, 2), (54, 84, 100): slice(2, 3)}
    for colour, rows in scene.items():
        frame[rows] = colour
    write_gif(tmp_path / "film.gif", [frame, frame], fps=10)
    with Image.open(tmp_path / "film.gif") as film:
        pixels = np.asarray(film.convert("RGB"))
    for colour, rows in scene.items():
        assert (pixels[rows] == colour).all()
