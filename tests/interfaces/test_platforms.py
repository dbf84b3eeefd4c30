"""What differs between Linux, macOS and Windows, as far as one of them can show it."""

import ast
import gc
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, load_supervised, with_path

from noisy_envs.registration import short_name
from noisy_envs.training.process import stop_signals

SOURCES = [
    path
    for folder in ("noisy_envs", "agents", "supervised", "tools", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def opens_text_of_any_encoding(call):
    """Tell whether a call opens a file as text in the system's encoding, which is not UTF-8 on Windows."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name not in ("open", "read_text", "write_text", "fdopen") or "encoding" in [word.arg for word in call.keywords]:
        return False
    if isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") in ("os", "tarfile", "Image"):
        return False
    words = [node.value for node in call.args if isinstance(node, ast.Constant)]
    return not (name in ("open", "fdopen") and any(isinstance(word, str) and "b" in word for word in words))


def test_text_files_are_utf8_everywhere():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and opens_text_of_any_encoding(node)
    ]
    assert not found


def test_programs_print_where_the_output_knows_few_letters():
    """As into a pipe on Windows; the help has "−"."""
    pytest.importorskip("torch")
    pytest.importorskip("tyro")
    words = [sys.executable, ROOT / "supervised" / "bounds.py", "--help"]
    env = {**with_path(ROOT), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout


@pytest.mark.parametrize(
    ("env_id", "name"),
    [
        ("noisy_envs/SimpleTag-1v3v4-v0", "SimpleTag-1v3v4-v0"),
        ("noisy_envs:noisy_envs/SimpleTag-v0", "SimpleTag-v0"),
        ("my_module:Fruit-v0", "Fruit-v0"),
        ("space/{Big}-v1", "-Big--v1"),
    ],
)
def test_folders_have_names_that_windows_takes(env_id, name):
    assert short_name(env_id) == name


def test_ctrl_break_stops_a_run_where_there_is_one(monkeypatch):
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGTERM, raising=False)
    assert stop_signals().count(signal.SIGTERM) == 2


def test_no_file_is_renamed_while_it_is_mapped(tmp_path, monkeypatch):
    """Windows refuses that."""
    pytest.importorskip("tyro")
    pytest.importorskip("torch")
    synthetic = load_supervised("synthetic")
    renamed = []

    def replace(path, target, rename=Path.replace):
        gc.collect()
        renamed.append([x for x in gc.get_objects() if type(x) is np.memmap and x.filename == str(path)])
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    synthetic.load_sets(synthetic.Sets(60, 4, 5, 7), tmp_path, workers=2)
    assert renamed == [[]]
