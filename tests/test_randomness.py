"""Counter-based randomness: uniform, independent along each of its coordinates, exact, equal on each backend."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from noisy_envs.randomness import MASK, MAX_SEED, IntegerStream, _mix, episode_key, uniforms

COUNT = 1 << 18
SIGMAS = 5.0  # standard deviations of the normal law; nothing here is random, so a test passes always or never
ZERO = np.zeros(1, np.int64)
MANY = np.arange(COUNT)
SEEDS = np.array([0, 1, 2**31, 2**32 - 1, 2**32, 2**62, MAX_SEED - 1, MAX_SEED])


def draw(seed=ZERO, episode=ZERO, counter=ZERO, counts=(1,), **options):
    """Draw numbers, an array for each of `counts`; one seed, episode or counter goes with many of the others."""
    key = episode_key(*np.broadcast_arrays(seed, episode))
    rows = max(len(key), len(counter))
    return uniforms(key, np.broadcast_to(counter, (rows,)), counts, **options)


# COUNT numbers along one coordinate, the others fixed
ALONG = {
    "index": lambda: draw(counts=(COUNT,))[0][0],
    "index of stream 3": lambda: draw(counts=(1, 0, 2, COUNT))[3][0],
    "stream": lambda: np.concatenate(draw(counter=MANY[: COUNT // 256], counts=(1,) * 256), axis=1).ravel(),
    "counter": lambda: draw(counter=MANY)[0][:, 0],
    "episode": lambda: draw(episode=MANY)[0][:, 0],
    "low bits of the seed": lambda: draw(seed=MANY)[0][:, 0],
    "high bits of the seed": lambda: draw(seed=MANY << 32)[0][:, 0],
    "seed and episode together": lambda: draw(seed=MANY, episode=MANY)[0][:, 0],
}
along = pytest.mark.parametrize("coordinate", ALONG)


def bits(word, width):
    """Return the bits (B, width) of words (B,)."""
    return word[:, None] >> np.arange(width) & 1


def words(u):
    """Return the 24 bits of which a number is made, as an integer."""
    return (u.astype(np.float64) * 2**24).astype(np.int64)


def unevenness(cells, size):
    """Chi-square of how many numbers each of `size` cells holds, as its distance from the mean in deviations."""
    counts = np.bincount(cells, minlength=size)
    expected = len(cells) / size
    return (((counts - expected) ** 2).sum() / expected - (size - 1)) / np.sqrt(2 * (size - 1))


@along
def test_uniform(coordinate):
    u = ALONG[coordinate]().astype(np.float64)
    assert u.shape == (COUNT,)
    assert abs(unevenness((u * 256).astype(int), 256)) < SIGMAS  # too even is no chance either
    gap = np.abs(np.sort(u) - (np.arange(COUNT) + 0.5) / COUNT).max()  # Kolmogorov-Smirnov
    assert 0.2 < gap * np.sqrt(COUNT) < 2.2


@along
def test_each_bit_is_fair(coordinate):
    ones = bits(words(ALONG[coordinate]()), 24).mean(axis=0)
    np.testing.assert_allclose(ones, 0.5, atol=SIGMAS * 0.5 / np.sqrt(COUNT))


@along
@pytest.mark.parametrize("lag", [1, 2, 62])
def test_neighbours_are_independent(coordinate, lag):
    u = ALONG[coordinate]().astype(np.float64)
    one, other = u[:-lag], u[lag:]
    assert abs(np.corrcoef(one, other)[0, 1]) < SIGMAS / np.sqrt(COUNT)
    assert abs(unevenness((one * 32).astype(int) * 32 + (other * 32).astype(int), 1024)) < SIGMAS


@pytest.mark.parametrize("coordinate", ["mixer", "seed", "episode", "counter"])
def test_each_input_bit_moves_half_of_the_output(coordinate):
    width = {"mixer": 32, "seed": 63, "episode": 32, "counter": 32}[coordinate]
    x = np.random.default_rng(0).integers(0, 1 << width, size=1 << 15)

    def out(x):
        return bits(_mix(x), 32) if coordinate == "mixer" else bits(words(draw(**{coordinate: x})[0][:, 0]), 24)

    moved = [(out(x) != out(x ^ (1 << bit))).mean(axis=0) for bit in range(width)]  # (width, 24 or 32)
    np.testing.assert_allclose(moved, 0.5, atol=SIGMAS * 0.5 / np.sqrt(len(x)))


def test_mixer_is_one_to_one():
    x = np.concatenate([MANY, MANY ^ 1 << 31, MASK - MANY])
    mixed = _mix(x)
    assert mixed.min() >= 0 and mixed.max() <= MASK and len(np.unique(mixed)) == len(x)


@pytest.mark.parametrize("scattered", [False, True])
def test_a_million_episodes_have_different_keys(scattered):
    """With 32 bits alone about a hundred pairs of scattered seeds would share theirs."""
    seed, episode = np.repeat(np.arange(1000), 1000), np.tile(np.arange(1000), 1000)
    key = episode_key(np.random.default_rng(0).integers(MAX_SEED, size=len(seed)) if scattered else seed, episode)
    assert key.shape == (1_000_000, 2) and key.min() >= 0 and key.max() <= MASK
    assert len(np.unique(key[:, 0].astype(np.uint64) << np.uint64(32) | key[:, 1].astype(np.uint64))) == len(key)


def test_episodes_past_32_bits_are_new():
    """With 32 bits of the number alone a world would play its first episodes again."""
    episode = (np.array([0, 1, 2, 3, 2**20, 2**29])[:, None] * 2**32 + np.arange(50_000)).ravel()
    key = episode_key(np.full_like(episode, 12345), episode)
    assert key.min() >= 0 and key.max() <= MASK
    assert len(np.unique(key[:, 0].astype(np.uint64) << np.uint64(32) | key[:, 1].astype(np.uint64))) == len(key)


def test_range_and_exactness():
    (u,), (exact,) = draw(counts=(1 << 20,)), draw(counts=(1 << 20,), dtype=np.float64)
    assert u.dtype == np.float32 and exact.dtype == np.float64
    np.testing.assert_array_equal(u, exact)  # float32 lost nothing
    assert u.min() >= 0 and u.max() < 1
    assert (exact * 2**24 % 1 == 0).all() and (exact * 2**23 % 1 != 0).any()


def test_numbers_never_change():
    """A later version must replay an episode: these numbers, from Python's unbounded integers, are a promise."""
    seed, episode, counter = np.array([0, 5, MAX_SEED]), np.array([0, 7, 2**31]), np.array([0, 9, 129])
    first, second = draw(seed, episode, counter, counts=(2, 1))
    assert words(first).tolist() == [[12747320, 3123175], [13822026, 8979789], [6480456, 15841070]]
    assert words(second).tolist() == [[9409458], [9944695], [12345845]]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_torch_draws_the_same(dtype):
    torch = pytest.importorskip("torch")
    seed, episode = np.repeat(SEEDS, 50), np.tile(np.arange(50), len(SEEDS))
    counter, counts = np.arange(len(seed)), (2, 0, 31)
    key, tensor_key = episode_key(seed, episode), episode_key(torch.from_numpy(seed), torch.from_numpy(episode))
    np.testing.assert_array_equal(key, tensor_key.numpy())
    ours = uniforms(key, counter, counts, getattr(np, dtype))
    theirs = uniforms(tensor_key, torch.from_numpy(counter), counts, getattr(torch, dtype))
    for array, tensor in zip(ours, theirs, strict=True):
        assert array.dtype == tensor.numpy().dtype == dtype
        np.testing.assert_array_equal(array, tensor.numpy())


def test_many_counters_of_one_episode_at_once():
    key, counters = episode_key(np.array([3]), np.array([4])), np.arange(200)
    together = uniforms(key, counters, (2, 5))
    for t in counters:
        for stream, alone in zip(together, uniforms(key, counters[t : t + 1], (2, 5)), strict=True):
            np.testing.assert_array_equal(stream[t : t + 1], alone)


def test_a_stream_that_grows_moves_no_number():
    few, many = draw(SEEDS, counts=(1, 3, 2)), draw(SEEDS, counts=(9, 1000, 2, 4))
    for short, long in zip(few, many, strict=False):
        np.testing.assert_array_equal(short, long[:, : short.shape[1]])


def test_every_seed_is_different():
    u = draw(SEEDS, counts=(2,))[0]
    assert len(np.unique(u[:, 0])) == len(np.unique(u[:, 1])) == len(SEEDS)
    np.testing.assert_array_equal(u[-1:], draw(np.array([MAX_SEED]), counts=(2,))[0])


def fair(counts, expected):
    """Demand that counts differ from what is expected by no more than chance: chi squared within five sigmas."""
    counts, freedom = np.asarray(counts), np.size(counts) - 1
    assert ((counts - expected) ** 2 / expected).sum() <= freedom + SIGMAS * np.sqrt(2 * freedom)


SCALAR = 20_000
STORED = {
    0: [759, 830, 188, 0, 1, 3, 6],
    1: [532, 136, 607, 3, 2, 1, 3],
    2**32: [514, 698, 440, 0, 5, 1, 4],
    MAX_SEED: [854, 163, 699, 8, 1, 2, 1],
}


@pytest.mark.parametrize("count", [1, 2, 7, 42])
def test_scalar_draws_are_uniform_along_seeds_and_within_one(count):
    one = IntegerStream(0)
    for drawn in (
        [IntegerStream(seed).below(count) for seed in range(SCALAR)],
        [one.below(count) for _ in range(SCALAR)],
    ):
        assert min(drawn) == 0 and max(drawn) == count - 1
        fair(np.bincount(drawn, minlength=count), SCALAR / count)


def test_scalar_draws_of_one_seed_are_independent():
    pairs = np.zeros((8, 8))
    for seed in range(SCALAR):
        stream = IntegerStream(seed)
        pairs[stream.below(8), stream.below(8)] += 1
    fair(pairs, SCALAR / 64)


def test_between_includes_both_ends():
    stream = IntegerStream(3)
    assert {stream.between(-2, 1) for _ in range(200)} == {-2, -1, 0, 1}
    assert {stream.between(5, 5) for _ in range(5)} == {5}


@pytest.mark.parametrize(("count", "size"), [(4, 4), (5, 2), (3, 0)])
def test_a_sample_is_a_fair_arrangement(count, size):
    possible = list(permutations(range(count), size))
    drawn = Counter(tuple(IntegerStream(seed).sample(count, size)) for seed in range(SCALAR))
    assert set(drawn) == set(possible)
    fair([drawn[one] for one in possible], SCALAR / len(possible))


@pytest.mark.parametrize("places", [[0], [400], [0, 1, 2], [3, 64, 65, 127, 128, 399], list(range(1, 81, 3))])
def test_a_member_is_any_bit_equally_often(places):
    stream, bits = IntegerStream(1), sum(1 << place for place in places)
    drawn = Counter(stream.member(bits) for _ in range(SCALAR))
    assert set(drawn) == set(places)
    fair([drawn[place] for place in places], SCALAR / len(places))


def test_scalar_draws_never_change():
    def some(seed):
        stream = IntegerStream(seed)
        return [stream.below(1000) for _ in range(3)] + stream.sample(9, 3) + [stream.member(0b1011010)]

    assert {seed: some(seed) for seed in (0, 1, 2**32, MAX_SEED)} == STORED


def test_streams_of_no_numbers_are_empty_for_one_world_too():
    for size in (1, 2):
        key, counter = episode_key(np.arange(size), np.zeros(size, np.int64)), np.zeros(size, np.int64)
        assert [drawn.shape for drawn in uniforms(key, counter, (0, 0))] == [(size, 0)] * 2
