"""Distractor patches: the image is where the mask says, all else is noise, and more of it changes no other."""

import re
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from helpers import assert_same, draw_actions
from hypothesis import given, settings
from hypothesis import strategies as st
from seen import Seen

from noisy_envs import wrappers
from noisy_envs.wrappers import vector


def canvases(shows: str = "image", steps: int = 3, seed: int = 0, **options: Any) -> list[tuple[Any, Any, Any]]:
    """Return what is shown, the mask of its pixels, and the image itself, at a reset and each step."""
    env = wrappers.AddDistractorPatches(Seen(shows, length=99), **options)
    seen = []
    for action in (None, *draw_actions(env.action_space, steps)):
        canvas, *_, info = env.reset(seed=seed) if action is None else env.step(action)
        assert canvas in env.observation_space and info["snr"] == info["signal_mask"].mean()
        seen.append((canvas, info["signal_mask"], env.unwrapped.shown))
    return seen


@pytest.mark.parametrize("shows", ["image", "grey", "float"])
@pytest.mark.parametrize("content", ["uniform", "image"])
def test_the_image_lies_amid_a_ring_of_noise(shows: str, content: str) -> None:
    for canvas, mask, image in canvases(shows, content=content):
        height, width = image.shape[:2]
        inside = slice(8, 8 + height), slice(8, 8 + width)
        assert canvas.shape == (height + 16, width + 16, *image.shape[2:]) and canvas.dtype == image.dtype
        assert_same(canvas[inside], image)
        assert mask[inside].all() and mask.sum() == height * width
        others = {block(canvas, i, j).tobytes() for i in range(height // 8 + 2) for j in range(width // 8 + 2)}
        own = {block(image, i, j).tobytes() for i in range(height // 8) for j in range(width // 8)}
        assert (others == own) == (content == "image")


def block(image: np.ndarray, row: int, column: int, size: int = 8) -> np.ndarray:
    """Return the patch in a row and column."""
    return image[size * row : size * (row + 1), size * column : size * (column + 1)].copy()


def test_uniform_patches_reach_both_bounds_evenly() -> None:
    noise = np.concatenate([canvas[~mask].ravel() for canvas, mask, _ in canvases(steps=30)])
    counts = np.bincount(noise, minlength=256)
    assert counts.shape == (256,) and len(noise) > 100_000
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 256 + 5 * np.sqrt(2 * 256)  # chi-square


@pytest.mark.parametrize("over", [0, 3, 16, (1, 5)])
def test_covered_patches_are_not_signal(over: Any) -> None:
    numbers = set()
    for seed in range(30):
        episode = set()
        for canvas, mask, image in canvases(around=0, over=over, seed=seed):
            blocks = [(i, j) for i in range(4) for j in range(4)]
            seen = [block(mask, *place) for place in blocks]
            assert all(part.all() or not part.any() for part in seen)
            for place, part in zip(blocks, seen, strict=True):
                assert np.array_equal(block(canvas, *place), block(image, *place)) == part.all()
            episode.add(16 - sum(bool(part.all()) for part in seen))
        assert len(episode) == 1  # drawn once an episode
        numbers |= episode
    assert numbers == (set(range(1, 6)) if isinstance(over, tuple) else {over})


def test_places_are_covered_equally_often() -> None:
    counts = sum(~mask[::8, ::8] for _, mask, _ in canvases(around=0, over=4, steps=400))
    assert abs(counts / 401 - 0.25).max() < 5 * np.sqrt(0.25 * 0.75 / 401)


@pytest.mark.parametrize("content", ["uniform", "image"])
def test_more_noise_leaves_the_first_as_it_is(content: str) -> None:
    few, many = (canvases(around=n, content=content) for n in (1, 3))
    for (canvas, mask, _), (wide, wide_mask, _) in zip(few, many, strict=True):
        assert_same(canvas, wide[16:-16, 16:-16])
        assert_same(mask, wide_mask[16:-16, 16:-16])
    few, many = (canvases(around=0, over=n, content=content) for n in (2, 5))
    for (canvas, mask, _), (_, fewer_seen, _) in zip(few, many, strict=True):
        assert not (fewer_seen & ~mask).any() and canvas.shape == (32, 32, 3)


@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_noise_is_drawn_once_an_episode(frozen: bool) -> None:
    (first, mask, _), *others = canvases(over=2, frozen=frozen)
    for canvas, its, _ in others:
        assert np.array_equal(mask, its) == frozen
        assert np.array_equal(canvas[:8], first[:8]) == frozen


def test_the_image_moves_between_episodes() -> None:
    places = set()
    for seed in range(60):
        seen = canvases(around=1, moves=True, seed=seed, steps=2)
        corners = {tuple(np.argwhere(mask)[0]) for _, mask, _ in seen}
        assert len(corners) == 1
        for canvas, mask, image in seen:
            assert_same(canvas[mask].reshape(image.shape), image)
        places |= corners
    assert places == {(8 * i, 8 * j) for i in range(3) for j in range(3)}


def test_masks_of_the_environment_are_kept(backend: str) -> None:
    options = {"observation": "rgb"}
    envs = vector.AddDistractorPatches(
        gymnasium.make_vec("noisy_envs/BoxWorld-v0", 2, backend=backend, **options), patch_size=3, over=1
    )
    canvas, info = envs.reset(seed=0)
    for i in range(2):
        bare = gymnasium.make("noisy_envs/BoxWorld-v0", **options)
        env = wrappers.AddDistractorPatches(bare, patch_size=3, over=1)
        alone, its = env.reset(seed=i)
        np.testing.assert_array_equal(canvas[i], alone)
        np.testing.assert_array_equal(info["signal_mask"][i], its["signal_mask"])
        known = bare.reset(seed=i)[1]["signal_mask"]
        inner = its["signal_mask"][3:-3, 3:-3]
        assert not (inner & ~known).any() and 0 < inner.sum() <= known.sum() < known.size


def test_tokens_know_which_patches_are_noise() -> None:
    """What the agent sees: tokens of the canvas, each marked as its patch is."""
    env = wrappers.TokenizeObservation(wrappers.AddDistractorPatches(Seen("image"), over=2))
    tokens, info = env.reset(seed=0)
    assert tokens.shape == (1 + 36, 2 + 192 + 1) and info["signal_mask"].sum() == 1 + 16 - 2
    image = env.unwrapped.shown.astype(np.float32) / 255
    for token, is_signal in zip(tokens[1:], info["signal_mask"][1:], strict=True):
        row, column = np.round((token[:2] + 1) * 3 - 0.5).astype(int) - 1
        inside = 0 <= row < 4 and 0 <= column < 4
        shown = inside and np.allclose(token[2:-1], block(image, row, column).ravel())
        assert shown == is_signal


@pytest.mark.parametrize(
    ("shows", "options", "text"),
    [
        (
            "set",
            {},
            "Box(-1.0, 1.0, (10, 4), float32): expected an image (height, width, channels), or (height, width) uint8; "
            "AddNoiseTokens adds noise to other observations, after TokenizeObservation",
        ),
        ("image", {"over": 17}, "over=17: expected at most 16"),
        ("image", {"over": (2, 1)}, "over=(2, 1): expected at least 0 and low <= high"),
        ("image", {"around": -1}, "around=-1: expected at least 0"),
        ("image", {"patch_size": 5}, "patch_size=5: expected a divisor of the image's 32 and 32 pixels: 1, 2, 4, 8, "
         "16, 32"),
        ("image", {"content": "noise"}, "content='noise': expected one of 'uniform', 'image'"),
    ],
)  # fmt: skip
def test_what_is_refused_names_a_remedy(shows: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        wrappers.AddDistractorPatches(Seen(shows), **options)


@pytest.mark.filterwarnings("ignore:.*A Box observation space m..imum value is")
def test_images_without_bounds_get_their_own_patches() -> None:
    class Unbounded(Seen):
        def __init__(self) -> None:
            super().__init__("float")
            self.observation_space = spaces.Box(-np.inf, np.inf, (8, 16, 2), np.float32)

    with pytest.raises(ValueError, match=r"finite bounds, got Box.*; content='image' takes patches of the image$"):
        wrappers.AddDistractorPatches(Unbounded())
    env = wrappers.AddDistractorPatches(Unbounded(), content="image")
    assert env.reset(seed=0)[0] in env.observation_space


@st.composite
def images(draw: Any) -> Any:
    """Return a space of images and a size that divides them."""
    size = draw(st.integers(1, 4))
    shape = [size * draw(st.integers(1, 4)) for _ in range(2)] + draw(st.sampled_from([[], [1], [2], [3], [4]]))
    if len(shape) == 2 or draw(st.booleans()):
        return spaces.Box(0, draw(st.integers(0, 255)), shape, np.uint8), size
    low = draw(st.floats(-9, 9, width=32))
    return spaces.Box(low, low + draw(st.floats(0, 9, width=32)), shape, np.float32), size


@given(
    images(),
    st.integers(0, 2),
    st.integers(0, 20) | st.tuples(st.integers(0, 4), st.integers(0, 8)),
    st.sampled_from(["uniform", "image"]),
    *[st.booleans()] * 2,
)
@settings(max_examples=60, deadline=None)
@pytest.mark.filterwarnings("ignore:.*A Box observation space m..imum")
def test_any_options(image: Any, around: int, over: Any, content: str, frozen: bool, moves: bool) -> None:
    """They are refused in one line, or images and tokens are in their spaces, and a vector is its environments."""

    class Drawn(Seen):
        def __init__(self) -> None:
            super().__init__("image")
            self.observation_space = image[0]

    options: dict[str, Any] = {"around": around, "over": over, "content": content, "frozen": frozen, "moves": moves}
    low, high = over if isinstance(over, tuple) else (over, over)
    if not low <= high <= np.prod(image[0].shape[:2]) // image[1] ** 2:
        with pytest.raises(ValueError, match=r"^over=.*: expected at (least|most) \d+( and low <= high)?$"):
            wrappers.AddDistractorPatches(Drawn(), patch_size=image[1], **options)
        return
    singles = [wrappers.AddDistractorPatches(Drawn(), patch_size=image[1], **options) for _ in range(2)]
    envs = vector.AddDistractorPatches(SyncVectorEnv([Drawn] * 2), patch_size=image[1], **options)
    tokens = vector.TokenizeObservation(envs, patch_size=image[1])
    for step in range(3):
        seen, info = tokens.reset(seed=3) if step == 0 else tokens.step(np.array([3, 3]))[::4]
        assert seen in tokens.observation_space
        for i, env in enumerate(singles):
            canvas, *_, its = env.reset(seed=3 + i) if step == 0 else env.step(3)
            assert canvas in env.observation_space
            own = wrappers.TokenizeObservation(env, patch_size=image[1])._apply(canvas, its)
            assert_same(seen[i], own[0])
            assert_same(info["signal_mask"][i], own[1]["signal_mask"])
