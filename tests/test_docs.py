"""The README's programs and the examples run as they stand."""

import dataclasses
import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import noisy_envs
from noisy_envs.reference import play_reference, reference_returns
from noisy_envs.registry import CORES

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_program(block):
    if "torch" in block:
        pytest.importorskip("torch")
    exec(compile(block, "README.md", "exec"), {})


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_example(path, monkeypatch, tmp_path):
    for package, name in (("PIL", "write_gif"), ("stable_baselines3", "stable_baselines3"), ("torch", "torch")):
        if name in path.read_text():
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")


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


def test_unknown_id_has_no_references():
    with pytest.raises(KeyError, match="Nothing"):
        reference_returns("noisy_envs/Nothing-v0")


def test_benchmark_runs():
    pytest.importorskip("torch")
    code = (
        "import runpy, sys; sys.argv = ['x', '--help']; runpy.run_path('benchmarks/env_speed.py', run_name='__main__')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
