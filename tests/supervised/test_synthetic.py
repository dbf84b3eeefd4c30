"""The synthetic sets: the same however they are drawn, kept whole on the disk, spread as the paper's appendix says."""

import errno
import io
import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from cases import posix
from helpers import ROOT, load_supervised, with_path

torch = pytest.importorskip("torch")
synthetic = load_supervised("synthetic")
Chance = load_supervised("chance").Chance
Sets = synthetic.Sets

BLOCK = synthetic.BLOCK
SMALL = Sets(num_sets=2 * BLOCK + 300, num_vectors=4, num_features=5, seed=7)  # two blocks and a part
PAPERS_BASELINES = {  # Table 4: k, the centroid of all vectors, the target vector
    1: (0.093, 0.058), 2: (0.071, 0.044), 4: (0.055, 0.040), 8: (0.043, 0.041),
    16: (0.031, 0.048), 32: (0.020, 0.060), 64: (0.008, 0.080), 128: (0.000, 0.126),
}  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_values_depend_on_no_number_of_workers(tmp_path, workers):
    loaded = synthetic.load_sets(SMALL, tmp_path, workers)
    assert loaded.shape == SMALL[:3] and loaded.dtype == torch.float32
    assert torch.equal(loaded, synthetic.draw_sets(SMALL))
    assert not torch.equal(loaded[:300], loaded[BLOCK:][:300]) and not torch.equal(loaded[:300], loaded[2 * BLOCK :])


@pytest.mark.parametrize("fewer", [1, BLOCK - 1, BLOCK, BLOCK + 1, SMALL.num_sets - 1])
def test_a_shorter_data_set_is_the_start_of_a_longer(tmp_path, fewer):
    shorter = SMALL._replace(num_sets=fewer)
    for found in (synthetic.draw_sets(shorter), synthetic.load_sets(shorter, tmp_path)):
        assert torch.equal(found, synthetic.draw_sets(SMALL)[:fewer])


def test_a_set_is_of_its_number_whatever_is_drawn_with_it():
    whole = synthetic.draw_sets(SMALL)
    for items in ([3], [0, 1, 2], [1300, 3, 3, 700], []):
        assert torch.equal(synthetic.draw(SMALL, torch.tensor(items, dtype=torch.int64)), whole[items])


def test_sets_of_torchs_own_numbers_are_those_of_numpys(monkeypatch):
    """As they are drawn on a GPU."""
    items = torch.arange(50)
    numpys = synthetic.draw(SMALL, items)
    monkeypatch.setattr(Chance, "draw", Chance._draw)
    assert torch.equal(synthetic.draw(SMALL, items), numpys)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_sets_on_a_gpu_are_those_on_a_cpu():
    sets = Sets(5000, 16, 16)
    torch.testing.assert_close(synthetic.draw_sets(sets, "cuda").cpu(), synthetic.draw_sets(sets), rtol=0, atol=2e-6)


def test_seeds_and_sets_differ():
    items = torch.tensor([*range(100), 2**31, 2**32, 2**40])
    drawn = [synthetic.draw(SMALL._replace(seed=seed), items).flatten(1) for seed in (0, 1, 42, 2**32, 2**63 - 1)]
    numbers = torch.cat(drawn).sort(dim=1).values
    assert len(numbers.unique(dim=0)) == len(numbers) == 515
    assert (numbers[:, 1:] == numbers[:, :-1]).float().mean() < 1e-3  # and within a set


def test_the_global_random_states_are_neither_read_nor_changed(tmp_path):
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002  the state that is not to be used
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first = synthetic.load_sets(SMALL, tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), before[0])
    np.testing.assert_array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    torch.manual_seed(2)
    assert torch.equal(first, synthetic.load_sets(SMALL, tmp_path / "b"))


# the file


def test_the_file_is_written_once(tmp_path, monkeypatch):
    folder = tmp_path / "new" / "folder"
    first = synthetic.load_sets(SMALL, folder)
    assert [path.name for path in folder.iterdir()] == [f"sets-v2-seed7-{SMALL.num_sets}x4x5.npy"]
    monkeypatch.setattr(synthetic, "draw", None)
    again = synthetic.load_sets(SMALL, folder)
    assert torch.equal(first, again)
    kept = again.clone()
    again.zero_()  # which must not reach the file
    assert torch.equal(synthetic.load_sets(SMALL, folder), kept)


@pytest.mark.parametrize("field", Sets._fields)
def test_other_sets_have_another_file(field):
    assert SMALL._replace(**{field: 3}).file_name != SMALL.file_name


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_a_failure_while_writing_leaves_nothing(tmp_path, monkeypatch, error):
    draw = synthetic.draw

    def fail(sets, items):
        if BLOCK in items:
            raise error("stop")
        return draw(sets, items)

    monkeypatch.setattr(synthetic, "draw", fail)
    with pytest.raises(error):
        synthetic.load_sets(SMALL, tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    assert torch.equal(synthetic.load_sets(SMALL, tmp_path), synthetic.draw_sets(SMALL))


@posix
def test_a_kill_while_writing_leaves_no_file_of_that_name(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
import synthetic
draw, last = synthetic.draw, int(sys.argv[2]) - 1
synthetic.draw = lambda sets, some: os.kill(os.getpid(), signal.SIGKILL) if last in some else draw(sets, some)
synthetic.load_sets(synthetic.Sets(last + 1, 4, 5, 7), Path(sys.argv[1]), workers=1)
"""
    command = [sys.executable, "-c", code, str(tmp_path), str(SMALL.num_sets)]
    env = with_path(ROOT / "supervised", ROOT)
    assert subprocess.run(command, env=env, check=False).returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) and not (tmp_path / SMALL.file_name).exists()
    assert torch.equal(synthetic.load_sets(SMALL, tmp_path), synthetic.draw_sets(SMALL))
    assert [path.name for path in tmp_path.iterdir()] == [SMALL.file_name]  # what the killed one left is gone


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system gives room as it is used")
def test_a_full_disk_is_told_before_anything_is_drawn(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{re.escape(str(tmp_path / SMALL.file_name))}'"):
        synthetic.load_sets(SMALL, tmp_path)
    assert not list(tmp_path.iterdir())


class Evil:
    """A pickle that would make a folder."""

    def __reduce__(self):
        return os.mkdir, ("evil",)


def lying(shape):
    """The start of a file whose header promises more than follows."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.getvalue() + bytes(64)


def saved(save, values):
    """The bytes that NumPy writes."""
    file = io.BytesIO()
    save(file, values)
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        lying(SMALL[:3]),
        lying((10**12, 10**12, 10**12)),
        lying((-1, 4, 5)),
        saved(np.save, np.array([Evil()], object)),
        saved(np.savez, np.zeros(3)),
        pickle.dumps(Evil()),
    ],
    ids=["lying", "overflowing", "negative", "objects", "archive", "pickle"],
)
def test_a_crafted_file_is_refused_and_runs_nothing(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / SMALL.file_name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{re.escape(SMALL.file_name)} .*delete it"):
        synthetic.load_sets(SMALL, tmp_path)
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("damage", ["empty", "cut header", "cut", "text"])
def test_a_damaged_file_is_refused(tmp_path, damage):
    synthetic.load_sets(SMALL, tmp_path)
    path = tmp_path / SMALL.file_name
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "cut header": whole[:40], "cut": whole[:-4], "text": b"no numbers"}[damage])
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} is not a file of sets.*delete it"):
        synthetic.load_sets(SMALL, tmp_path)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((SMALL.num_sets, 5, 4), "float32"), ((3, 4, 5), "f4"), (SMALL[:3], "f8")]
)
def test_a_file_of_something_else_is_refused(tmp_path, shape, dtype):
    path = tmp_path / SMALL.file_name
    np.save(path, np.zeros(shape, dtype))
    with pytest.raises(
        ValueError, match=rf"{re.escape(str(path))} holds .*, expected float32 \({SMALL.num_sets}, 4, 5\)"
    ):
        synthetic.load_sets(SMALL, tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "least"),
    [("num_sets", 0, 1), ("num_vectors", 1, 2), ("num_features", 0, 1), ("seed", -1, 0)],
)
def test_numbers_too_small_are_named(tmp_path, field, value, least):
    wrong = SMALL._replace(**{field: value})
    for call in (synthetic.draw_sets, lambda sets: synthetic.load_sets(sets, tmp_path)):
        with pytest.raises(ValueError, match=f"^{field}={value}: expected at least {least}$"):
            call(wrong)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("field", "value", "most"), [("seed", 2**63, 2**63 - 1), ("num_vectors", 2**22, 2**24 // 5)])
def test_numbers_too_large_are_named(field, value, most):
    """A stream of chance has 2²⁴ numbers."""
    with pytest.raises(ValueError, match=f"^{field}={value}: expected at most {most}$"):
        synthetic.draw_sets(SMALL._replace(**{field: value}))


def test_workers_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"^workers=0: expected at least 1$"):
        synthetic.load_sets(SMALL, tmp_path, 0)


# the distributions

KINDS = ("normal", "exponential", "uniform")


def long_columns(num_features, count=300, num_vectors=2000):
    """Columns of so many vectors that each shows its kind (count, N, D), times sqrt(D), and the kinds (count, D).

    Excess kurtosis and skewness: normal 0 and 0, uniform -1.2 and 0, exponential 6 and ±2.
    """
    sets = synthetic.draw_sets(Sets(count, num_vectors, num_features, 1)).numpy() * np.sqrt(num_features)
    centred = sets - sets.mean(axis=1, keepdims=True)
    unit = centred / centred.std(axis=1, keepdims=True)
    skewness, kurtosis = (unit**3).mean(axis=1), (unit**4).mean(axis=1) - 3
    return sets, np.where(abs(skewness) > 1, 1, np.where(kurtosis < -0.7, 2, 0))


@pytest.mark.parametrize("num_features", [1, 2, 3, 5, 16])
def test_columns_of_each_kind(num_features):
    _, kinds = long_columns(num_features, num_vectors=500 if num_features < 16 else 1000)
    counts = np.stack([(kinds == kind).sum(axis=1) for kind in range(3)], axis=1)  # (sets, 3)
    each, rest = divmod(num_features, 3)
    assert (counts >= each).all() and (counts.sum(axis=1) == num_features).all()
    if rest:  # as likely of each kind, and if there are two of them, each for itself
        shares = (counts - each).mean(axis=0) / rest
        np.testing.assert_allclose(shares, 1 / 3, atol=0.1)
        assert {tuple(row) for row in np.unique(counts - each, axis=0).tolist()} == {
            tuple(np.bincount(pick, minlength=3)) for pick in np.ndindex(*[3] * rest)
        }
    places = np.stack([(kinds == kind).mean(axis=0) for kind in range(3)])  # (3, D)
    np.testing.assert_allclose(places, 1 / 3, atol=0.11)
    if num_features == 3:
        assert set(map(tuple, kinds.tolist())) == set(permutations(range(3)))


def test_columns_are_drawn_each_for_itself():
    sets, _ = long_columns(16, count=20)
    together = np.corrcoef(np.concatenate([*sets.transpose(0, 2, 1)]))
    assert abs(together - np.eye(len(together))).max() < 0.15  # 5 standard errors at N = 2000 are 0.11


def assert_fills(values, low, high, noise):
    """Demand that values spread evenly from low to high, give or take their noise."""
    width = high - low
    assert low - noise <= values.min() <= low + 0.03 * width + noise
    assert high - 0.03 * width - noise <= values.max() <= high + noise
    np.testing.assert_allclose(np.quantile(values, [0.25, 0.5, 0.75]), low + width * np.array([0.25, 0.5, 0.75]),
                               atol=0.07 * width)  # fmt: skip


def test_ranges_of_the_parameters():
    sets, kinds = long_columns(16)
    normal, exponential, uniform = (sets.transpose(0, 2, 1)[kinds == kind] for kind in range(3))  # (columns, N)
    assert_fills(normal.mean(axis=1), -3, 3, 0.2)
    assert_fills(normal.std(axis=1), 1, 3, 0.15)

    sign = np.sign((exponential - np.median(exponential, axis=1, keepdims=True)).mean(axis=1))  # of the long tail
    assert 0.45 < (sign > 0).mean() < 0.55
    for one in (-1, 1):
        upright = one * exponential[sign == one]  # Exponential(λ) - Uniform(0, 3)
        start = upright.min(axis=1)
        assert_fills(start, -3, 0, 0.02)
        assert_fills(upright.mean(axis=1) - start, 0.1, 2, 0.15)  # λ is the mean

    low, high = uniform.min(axis=1), uniform.max(axis=1)
    assert_fills(low, -3, 3, 0.02)
    assert_fills(high - low, 0.2, 3, 0.02)
    assert abs(np.corrcoef(low, high - low)[0, 1]) < 0.1


@pytest.fixture(scope="module")
def papers_sets():
    return synthetic.draw_sets(Sets(20_000, 128, 16))


@pytest.mark.parametrize("k", PAPERS_BASELINES)
def test_the_papers_baselines(papers_sets, k):
    targets = synthetic.centroids(papers_sets, k)
    for guess, told in zip((papers_sets.mean(dim=1), papers_sets[:, 0]), PAPERS_BASELINES[k], strict=True):
        assert abs((guess - targets).square().mean().item() - told) <= 0.03 * told + 0.0005


# neighbours

SETS = torch.randn(40, 12, 3, generator=torch.Generator().manual_seed(0))


def indices(sets, k):
    shares = synthetic.nearest(sets, k)
    assert set(shares.unique().tolist()) <= {0, 1} and shares.dtype == sets.dtype
    return [row.nonzero()[:, 0].tolist() for row in shares]


@pytest.mark.parametrize("k", [1, 2, 5, 11])
def test_nearest_beside_brute_force_and_scikit_learn(k):
    neighbors = pytest.importorskip("sklearn.neighbors")
    brute, library = [], []
    for points in SETS.double().numpy():
        distances = {i: ((points[i] - points[0]) ** 2).sum() for i in range(1, len(points))}
        brute.append(sorted(sorted(distances, key=distances.get)[:k]))
        found = neighbors.NearestNeighbors(n_neighbors=k).fit(points[1:]).kneighbors(points[:1], return_distance=False)
        library.append(sorted((found[0] + 1).tolist()))
    assert indices(SETS, k) == brute == library
    means = np.stack([points[rows].mean(axis=0) for points, rows in zip(SETS.numpy(), brute, strict=True)])
    np.testing.assert_allclose(synthetic.centroids(SETS, k), means, rtol=0, atol=1e-6)


@pytest.mark.parametrize("duplicates", [1, 3, 11])
def test_the_first_is_left_out_by_its_place(duplicates):
    """Its duplicates are neighbours, itself is not."""
    sets = SETS.clone()
    sets[:, 12 - duplicates :] = sets[:, :1]
    assert indices(sets, duplicates) == [list(range(12 - duplicates, 12))] * 40
    assert torch.allclose(synthetic.centroids(sets, duplicates), sets[:, 0], atol=1e-6)
    assert all(0 not in row and len(set(row)) == 11 for row in indices(sets, 11))


@pytest.mark.parametrize("k", range(1, 8))
def test_ties_are_shared_in_any_order(k):
    """Distances of 0, 1, 1, 1, 4, 4 and 9: those that tie for the last place count alike, whatever their order."""
    points = torch.tensor([[0, 0], [0, 0], [1, 0], [0, 1], [-1, 0], [2, 0], [0, -2], [3, 0]], dtype=torch.float32)
    orders = [[0, *(1 + place for place in order)] for order in itertools.islice(permutations(range(7)), 0, None, 101)]
    sets = points[torch.tensor(orders)]
    squares = [0, 1, 1, 1, 4, 4, 9]
    last = squares[k - 1]
    share = (k - sum(x < last for x in squares)) / squares.count(last)
    shares = torch.tensor([0.0, *((x < last) + share * (x == last) for x in squares)])
    expected = (shares[:, None] * points).sum(dim=0) / k
    torch.testing.assert_close(synthetic.nearest(sets, k), shares[torch.tensor(orders)])
    torch.testing.assert_close(synthetic.centroids(sets, k), expected.expand(len(orders), 2), rtol=0, atol=1e-6)


def test_k_of_all_vectors_gives_all_others():
    assert indices(SETS, 12) == indices(SETS, 11) == [list(range(1, 12))] * 40
    assert torch.allclose(synthetic.centroids(SETS, 12), SETS[:, 1:].mean(dim=1), atol=1e-6)


@pytest.mark.parametrize("batch", [1, 7, 39, 40, 41])
def test_centroids_do_not_depend_on_the_batch(batch):
    assert torch.equal(synthetic.centroids(SETS, 4, batch), synthetic.centroids(SETS, 4))


def test_the_order_of_the_others_is_nothing_to_the_centroid():
    order = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(11, generator=torch.Generator())])
    assert torch.allclose(synthetic.centroids(SETS[:, order], 4), synthetic.centroids(SETS, 4), atol=1e-6)


@pytest.mark.parametrize("k", [-1, 0, 13])
def test_a_bad_k_is_named(k):
    for call in (synthetic.nearest, synthetic.centroids):
        with pytest.raises(ValueError, match=f"^k={k}: expected a number from 1 to 12"):
            call(SETS, k)


def test_files_are_readable_by_others(tmp_path):
    synthetic.load_sets(SMALL, tmp_path)
    assert Counter(path.stat().st_mode & 0o777 for path in tmp_path.iterdir()) == {0o644: 1}
