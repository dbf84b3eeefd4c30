"""Agents and pooling heads compute what they computed when tools/store_training.py stored it."""

import json
import shutil
import sys
from itertools import product

import pytest
from cases import by_default
from helpers import ROOT

torch = pytest.importorskip("torch")
pytest.importorskip("tyro")
import numpy as np  # noqa: E402  torch may be missing

sys.path.insert(0, str(ROOT / "tools"))
import store_training  # noqa: E402

sys.path.pop(0)

from noisy_envs.training.main import main  # noqa: E402

STORED = json.loads((store_training.FOLDER / "metrics.json").read_text(encoding="utf-8"))
pytestmark = pytest.mark.skipif(
    STORED["versions"] != store_training.versions(), reason=f"stored with {STORED['versions']}"
)


@by_default(
    ("head", "game", "dtype"),
    [
        ("adapool", "SimpleCentroid-v0", "float32"),
        ("avgpool", "SimpleCentroid-v0", "float64"),
        ("avgpool", "BoxWorldEntities-v0", "float32"),
        ("clstoken", "SimpleTag-v0", "float32"),
        ("clstoken", "BoxWorldEntities-v0", "float64"),
        ("maxpool", "SimpleTag-v0", "float64"),
    ],
    product(store_training.HEADS, store_training.GAMES, ["float32", "float64"]),
)
def test_an_agent_learns_as_it_did(head, game, dtype):
    """Compare three updates in float64, of which only the gradient norm is logged in full; one in float32."""
    count = 3 if dtype == "float64" else 1
    expected, found = (
        STORED["metrics"][f"{head} {game} {dtype}"][:count],
        store_training.train(head, game, dtype)[:count],
    )
    for old, new in zip(expected, found, strict=True):
        assert old.keys() == new.keys()
        for key, value in old.items():
            exact = dtype == "float64" and key == "losses/grad_norm"
            wanted = pytest.approx(value, rel=1e-9 if exact else 1e-6, abs=0 if exact else 1e-7, nan_ok=True)
            assert new[key] == wanted, (key, old["global_step"])


@pytest.mark.parametrize("head", store_training.HEADS)
def test_a_head_pools_as_it_did(head):
    with np.load(store_training.FOLDER / "heads.npz") as stored:
        found = store_training.pool(head)
        assert set(found) == {name for name in stored if name.startswith(head)}
        for name, value in found.items():
            np.testing.assert_allclose(value, stored[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("option", ["--resume", "--evaluate"])
def test_a_checkpoint_of_the_first_format_is_refused_in_one_line(option, tmp_path):
    """Its settings had other names, and nothing converts them: the package was not released."""
    shutil.copy(store_training.FOLDER / "first_format.pt", tmp_path / "checkpoint.pt")
    with pytest.raises(SystemExit, match=r"^error: [^\n]*checkpoint\.pt was written by another version of this agent"):
        main(store_training.load_agent("avgpool"), [option, str(tmp_path), "--run-dir", str(tmp_path / "runs")])
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint.pt"}
