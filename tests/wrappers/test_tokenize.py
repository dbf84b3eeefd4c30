"""Sets, images and dictionaries as tokens: what is seen contains the data, and what is refused names a remedy."""

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import assert_same, draw_actions, load_agent, play, train_tiny
from seen import SPACES, Seen

from noisy_envs import wrappers
from noisy_envs.tokens import TokenSpec
from noisy_envs.wrappers import noisy_tokens, vector

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*A Box observation space m..imum value is"),
    pytest.mark.filterwarnings("ignore:.*is different from the unwrapped version"),  # as a wrapped one should be
]
KINDS = ["set", "integers", "unbounded", "one", "image", "grey", "float", "wide", "dict", "nested"]
each_kind = pytest.mark.parametrize("shows", KINDS)

STACKS: dict[str, Callable[[Any, Any], Any]] = {
    "tokens": lambda w, env: w.TokenizeObservation(env, squash=True),
    "noise": lambda w, env: w.AddNoiseTokens(w.TokenizeObservation(env), (1, 4), "marginal"),
    "ring": lambda w, env: w.TokenizeObservation(w.AddDistractorPatches(env)),
    "cover": lambda w, env: w.TokenizeObservation(w.AddDistractorPatches(env, 0, (0, 2), frozen=True)),
    "moves": lambda w, env: w.AddDistractorPatches(env, 2, 1, 4, "image", moves=True),
}
CASES = [(shows, stack) for stack in ("tokens", "noise") for shows in KINDS]
CASES += [(shows, stack) for stack in ("ring", "cover", "moves") for shows in ("image", "grey", "float")]
each_case = pytest.mark.parametrize(("shows", "stack"), CASES)


def single(shows: str, stack: str, **options: Any) -> Any:
    return STACKS[stack](wrappers, gymnasium.make("tests/Seen-v0", shows=shows, **options))


def rows_of(part: Any, space: Any, size: int, name: str) -> list[tuple[list[float], str]]:
    """Return the tokens of a part, number by number, without role, and the names of their roles."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        keys = list(space.spaces) if isinstance(space, spaces.Dict) else range(len(space.spaces))
        path = f"{name}." if name else ""
        return [row for key in keys for row in rows_of(part[key], space[key], size, f"{path}{key}")]
    if isinstance(space, spaces.Discrete):
        part = [float(part == space.start + i) for i in range(space.n)]
    if np.ndim(part) == 1:
        return [([value], f"{name or 'feature'}[{i}]") for i, value in enumerate(part)]
    if np.ndim(part) == 2 and space.dtype != np.uint8:
        return [(list(row), name or "element") for row in part]
    low, high = float(space.low.min()), float(space.high.max())
    if high > 1e18:
        low, high = 0.0, 1.0
    height, width = part.shape[:2]
    rows = []
    for top in range(0, height, size):
        for left in range(0, width, size):
            place = [2 * (top + size / 2) / height - 1, 2 * (left + size / 2) / width - 1]
            pixels = [np.atleast_1d(part[top + i, left + j]) for i in range(size) for j in range(size)]
            rows.append(([*place, *((np.concatenate(pixels).astype(float) - low) / (high - low))], name or "patch"))
    return rows


@each_kind
@pytest.mark.parametrize("size", [4, 8])
def test_tokens_are_the_data(shows: str, size: int) -> None:
    env = wrappers.TokenizeObservation(gymnasium.make("tests/Seen-v0", shows=shows), patch_size=size)
    for action in (None, *draw_actions(env.action_space, 3)):
        tokens, *_, info = env.reset(seed=3) if action is None else env.step(action)
        expected = rows_of(env.unwrapped.shown, SPACES[shows], size, "")
        assert tokens.shape == (1 + len(expected), 1 + max(len(row) for row, _ in expected))
        assert not tokens[0].any()
        for token, (row, role) in zip(tokens[1:], expected, strict=True):
            np.testing.assert_allclose(token[: len(row)], row, rtol=1e-6, atol=1e-6)
            assert not token[len(row) : -1].any() and token[-1] == env.token_spec.roles[role]
        assert tokens in env.observation_space and info["snr"] == 1 and info["signal_mask"].all()


def test_whole_pixels_are_scaled_exactly() -> None:
    env = wrappers.TokenizeObservation(gymnasium.make("tests/Seen-v0", shows="image"), patch_size=32)
    (_, token), _ = env.reset(seed=0)
    assert_same(token[2:-1], env.unwrapped.shown.ravel() / np.float32(255))
    assert set(token[2:-1].tolist()) >= {0.0, 1.0} and token[:2].tolist() == [0, 0]


def test_numbers_without_bounds_are_squashed_on_request() -> None:
    for shows, columns in (("unbounded", slice(2)), ("wide", slice(0, 0)), ("set", slice(0, 0))):
        plain, squashed = (
            wrappers.TokenizeObservation(gymnasium.make("tests/Seen-v0", shows=shows), squash)
            for squash in (False, True)
        )
        before, after = plain.reset(seed=0)[0], squashed.reset(seed=0)[0]
        before[:, columns] = np.tanh(before[:, columns])
        np.testing.assert_allclose(after, before, rtol=1e-6)
        assert np.isfinite(squashed.observation_space.high).all()


@each_case
def test_gymnasium_is_content(shows: str, stack: str) -> None:
    check_env(single(shows, stack), skip_render_check=True)


@each_case
@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
def test_a_vector_is_its_single_environments(shows: str, stack: str, mode: AutoresetMode) -> None:
    envs = STACKS[stack](vector, SyncVectorEnv([lambda: Seen(shows)] * 3, autoreset_mode=mode))
    singles = SyncVectorEnv([lambda: single(shows, stack)] * 3, autoreset_mode=mode)
    assert envs.single_observation_space == singles.single_observation_space
    assert_same(*(one.reset(seed=5) for one in (envs, singles)))
    for action in draw_actions(singles.action_space, 10):
        ours, theirs = envs.step(action), singles.step(action)
        assert_same(ours[:4], theirs[:4])
        for mine, known in ((ours[4], theirs[4]), (ours[4].get("final_info", {}), theirs[4].get("final_info", {}))):
            for key in ("signal_mask", "snr"):
                assert (key in mine) == (key in known) and (key not in mine or (mine[key] == known[key]).all())
        if "final_obs" in theirs[4]:
            assert_same(ours[4]["final_obs"].tolist(), theirs[4]["final_obs"].tolist())
        if mode is AutoresetMode.DISABLED and ours[2].any():
            assert_same(*(one.reset(options={"reset_mask": ours[2].copy()})[0] for one in (envs, singles)))


@each_case
def test_copies_and_specs_make_the_same_again(shows: str, stack: str) -> None:
    env = single(shows, stack)
    actions = draw_actions(env.action_space, 6)
    here = play(env, actions, seed=1)
    for twin in (gymnasium.make(EnvSpec.from_json(env.spec.to_json())), copy.deepcopy(env)):
        assert_same(play(twin, actions, seed=1), here)
    assert_same(*(play(one, actions) for one in (env, pickle.loads(pickle.dumps(env)))))  # amid the episode
    if stack != "moves":
        assert env.token_spec == pickle.loads(pickle.dumps(env.token_spec))


def test_boxworlds_picture_becomes_patches_with_its_own_mask(backend: str) -> None:
    options = {"observation": "rgb"}
    envs = vector.TokenizeObservation(
        gymnasium.make_vec("noisy_envs/BoxWorld-v0", 2, backend=backend, **options), patch_size=1
    )
    tokens, info = envs.reset(seed=0)
    for i in range(2):
        env = wrappers.TokenizeObservation(gymnasium.make("noisy_envs/BoxWorld-v0", **options), patch_size=1)
        alone, its = env.reset(seed=i)
        np.testing.assert_array_equal(tokens[i], alone)
        np.testing.assert_array_equal(info["signal_mask"][i], its["signal_mask"])
        bare, known = gymnasium.make("noisy_envs/BoxWorld-v0", **options).reset(seed=i)
        assert its["signal_mask"].tolist() == [True, *known["signal_mask"].ravel()]
        assert its["snr"] == its["signal_mask"].mean() < 1
        np.testing.assert_allclose(alone[1:, 2:5], bare.reshape(-1, 3) / 255, rtol=1e-6)


def test_masks_of_pixels_and_rows_become_masks_of_tokens() -> None:
    pixels = np.zeros((32, 32), np.bool_)
    pixels[9, 31] = True
    env = wrappers.TokenizeObservation(gymnasium.make("tests/Seen-v0", shows="image", mask=pixels.tolist()))
    mask = env.reset(seed=0)[1]["signal_mask"]
    assert np.flatnonzero(mask).tolist() == [0, 1 + 4 + 3]  # the query; second row, last column
    rows = [True, False] * 5
    env = wrappers.TokenizeObservation(gymnasium.make("tests/Seen-v0", mask=rows))
    assert env.reset(seed=0)[1]["signal_mask"].tolist() == [True, *rows]
    for shows, shape, what in (("image", "(32, 32)", "pixel"), ("set", "(10,)", "row")):
        env = wrappers.TokenizeObservation(gymnasium.make("tests/Seen-v0", shows=shows, mask=[True]))
        text = f"info['signal_mask']: expected shape {shape}, a bool for each {what}, got (1,)"
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            env.reset(seed=0)


# what the agent sees


def test_the_agent_sees_pixels_among_noise() -> None:
    """Its tensors, after shuffling, hold each patch of the image once, and the noise besides."""
    pytest.importorskip("torch")
    from noisy_envs.training.gymnasium_envs import GymnasiumGame, GymnasiumVectorEnv

    game = GymnasiumGame("tests/Seen-v0", {"shows": "image", "num_noise": 8, "patch_size": 16})
    envs = GymnasiumVectorEnv(game, 2)
    tokens = envs.reset(seed=3)[0].numpy()
    assert tokens.shape == (2, 1 + 4 + 8, 2 + 16 * 16 * 3 + 1) and game.token_spec.roles["noise"] == 2
    for i, seen in enumerate(tokens):
        bare = Seen("image")
        image = bare.reset(seed=3 + i)[0].astype(np.float32) / 255
        shown = {tuple(row[:2]): row[2:-1].reshape(16, 16, 3) for row in seen if row[-1] == 1}
        assert len(shown) == 4
        for (row, column), pixels in shown.items():
            top, left = (int(8 * (place + 1) * 2) - 8 for place in (row, column))
            np.testing.assert_allclose(pixels, image[top : top + 16, left : left + 16], rtol=1e-6)


@pytest.mark.parametrize("shows", ["set", "image", "dict"])
def test_an_agent_trains_on_them(shows: str, tmp_path: Path) -> None:
    for package in ("torch", "tyro"):
        pytest.importorskip(package)
    words = ["--env-id", "tests/Seen-v0", "--num-noise", "4", "--env-kwargs", f"shows={shows}", "patch_size=4"]
    summary, _ = train_tiny(load_agent("adapool"), tmp_path, *words)
    assert summary["return"] == 1 + 2 + 3 + 4


# meaning


@pytest.mark.parametrize(
    ("shows", "noise", "text"),
    [
        (
            "set",
            2,
            """13 tokens of 5 features: feature[0] to feature[3], role
role     number  is
query         0  own
element       1  signal
noise         2  noise""",
        ),
        (
            "image",
            (1, 2),
            """19 tokens of 195 features: row, column, pixel[0,0,0] to pixel[7,7,2], role
role     number  is
query         0  own
patch         1  signal
noise         2  noise
padding      -1  padding""",
        ),
        (
            "dict",
            1,
            """15 tokens of 67 features: value[0] to value[65], role
role                  number  is
query                      0  own
agent                      1  signal
camera                     2  signal
me[0] to me[2]        3 to 5  signal
mode[0] to mode[2]    6 to 8  signal
noise                      9  noise""",
        ),
    ],
)
def test_a_spec_prints_itself(shows: str, noise: Any, text: str) -> None:
    env = noisy_tokens(gymnasium.make("tests/Seen-v0", shows=shows), noise)
    assert [line.split() for line in str(env.token_spec).splitlines()] == [line.split() for line in text.splitlines()]
    widths = {len(line.rsplit("  ", 1)[0]) for line in str(env.token_spec).splitlines()[1:]}
    assert len(widths) == 1  # aligned


@pytest.mark.parametrize(
    ("env_id", "kinds"),
    [
        (
            "noisy_envs/SimpleCentroid-1v3v28-v0",
            {"self": "own", "agent": "noise", "signal": "signal", "noise": "noise"},
        ),
        (
            "noisy_envs/SimpleTag-1v3v4-v0",
            {"self": "own", "obstacle": "noise", "predator": "signal", "prey": "signal"},
        ),
        (
            "noisy_envs/SimpleTagMPE-v0",
            {"self": "own", "obstacle": "signal", "predator": "signal", "prey": "signal"},
        ),
        ("noisy_envs/BoxWorldEntities-v0", {}),
    ],
)
def test_kinds_of_the_games_are_those_of_their_masks(env_id: str, kinds: dict[str, str]) -> None:
    env = gymnasium.make(env_id)
    spec = env.unwrapped.token_spec
    assert spec.kinds == kinds
    tokens, info = env.reset(seed=0)
    for name, number in spec.roles.items():
        marked = info["signal_mask"][tokens[:, -1] == number]
        assert (marked == (kinds[name] != "noise")).all()
    assert str(spec).count("\n") == (1 + len(kinds) if kinds else 1)


def test_kinds_may_be_named_and_are_checked() -> None:
    spec = TokenSpec(3, ("x", "role"), {"self": 0, "thing": 1}, kinds={"thing": "signal or noise"})
    assert spec.kinds == {"self": "own", "thing": "signal or noise", "padding": "padding"}
    with pytest.raises(ValueError, match=r"^kinds='loud': expected one of 'own', 'signal', 'noise', 'signal or noise'"):
        TokenSpec(3, ("x", "role"), {"self": 0}, kinds={"self": "loud"})


# refused


@pytest.mark.parametrize(
    ("shows", "size", "text"),
    [
        ("thin", 8, "patch_size=8: expected a divisor of the image's 12 and 18 pixels: 1, 2, 3, 6"),
        ("image", 0, "patch_size=0: expected at least 1"),
        (
            "channels",
            8,
            "Box(0, 255, (3, 32, 32), uint8): expected an image (height, width, channels), got its channels first; "
            "gymnasium.wrappers.TransformObservation with np.moveaxis makes it (32, 32, 3)",
        ),
        (
            "film",
            8,
            "Box(0, 255, (2, 8, 16, 3), uint8): expected a Box with at most three axes, got shape (2, 8, 16, 3); "
            "gymnasium.wrappers.ReshapeObservation makes it (16, 16, 3)",
        ),
        (
            "inner film",
            8,
            "Box(0, 255, (2, 8, 16, 3), uint8) in Dict('eye': Box(0, 255, (2, 8, 16, 3), uint8)): expected a Box with "
            "at most three axes, got shape (2, 8, 16, 3); gymnasium.wrappers.TransformObservation converts it",
        ),
        (
            "sequence",
            8,
            f"{SPACES['sequence']}: expected a space that can be flattened to a Box of fixed length; "
            "gymnasium.wrappers.TransformObservation converts it",
        ),
        ("empty", 8, "Box([], [], (0, 3), float32): expected at least one number"),
        (
            "named",
            8,
            "Dict('noise': Box(0.0, 1.0, (2, 3), float32)): expected features with different names, and none that is "
            "query, noise, padding, got noise; gymnasium.wrappers.TransformObservation converts it",
        ),
    ],
)
@pytest.mark.parametrize("module", [wrappers, vector])
def test_what_is_refused_names_a_remedy(module: Any, shows: str, size: int, text: str) -> None:
    env: Any = Seen(shows) if module is wrappers else SyncVectorEnv([lambda: Seen(shows)])
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        module.TokenizeObservation(env, patch_size=size)


def test_a_size_is_an_integer() -> None:
    with pytest.raises(TypeError, match=r"^patch_size=2.5: expected an integer$"):
        wrappers.TokenizeObservation(Seen("image"), patch_size=2.5)  # type: ignore[arg-type]


def test_the_remedies_work() -> None:
    wrap = gymnasium.wrappers
    for size in (1, 2, 3, 6):
        assert wrappers.TokenizeObservation(Seen("thin"), patch_size=size).reset(seed=0)
    moved = wrap.TransformObservation(
        Seen("channels"), lambda image: np.moveaxis(image, 0, -1), spaces.Box(0, 255, (32, 32, 3), np.uint8)
    )
    tokens, _ = wrappers.TokenizeObservation(moved, patch_size=32).reset(seed=0)
    np.testing.assert_allclose(tokens[1, 2:5], moved.unwrapped.shown[:, 0, 0] / 255, rtol=1e-6)
    assert wrappers.TokenizeObservation(wrap.ReshapeObservation(Seen("film"), (16, 16, 3))).reset(seed=0)
    shaped = wrap.TransformObservation(
        Seen("inner film"), lambda seen: seen["eye"].reshape(16, 16, 3), spaces.Box(0, 255, (16, 16, 3), np.uint8)
    )
    assert wrappers.TokenizeObservation(shaped).reset(seed=0)
