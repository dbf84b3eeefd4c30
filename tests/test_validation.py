"""Options as they come from YAML, Hydra and NumPy: sequences and arrays are tuples, and nothing real is infinite."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from helpers import load_supervised

from noisy_envs import simple_centroid_v0
from noisy_envs.games.simple_centroid import SimpleCentroid
from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import check_count, highest, lowest, plain
from noisy_envs.wrappers import AddNoiseTokens, noisy_tokens


class Listed(Sequence[Any]):
    """A sequence that is neither list nor tuple, as OmegaConf's ListConfig."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:  # names the test
        return f"Listed{self.items}"


RANGES: dict[str, Callable[[int, int], Any]] = {
    "sequence": Listed,
    "list": lambda low, high: [low, high],
    "array": lambda low, high: np.array([low, high]),
    "numbers": lambda low, high: (np.int64(low), np.uint8(high)),
    "sequence of numbers": lambda low, high: Listed(np.int32(low), np.array(high)),
}
each_range = pytest.mark.parametrize("kind", RANGES)
CENTROID, TAG, BOX = "noisy_envs/SimpleCentroid-v0", "noisy_envs/SimpleTag-v0", "noisy_envs/BoxWorld-v0"


@each_range
@pytest.mark.parametrize(
    ("env_id", "option"), [(CENTROID, "num_noise"), (CENTROID, "num_signal"), (TAG, "num_obstacles"), (BOX, "size")]
)
def test_ranges_of_games_are_taken_in_any_form(kind: str, env_id: str, option: str) -> None:
    given = {option: RANGES[kind](5, 7)}
    for env in (gymnasium.make(env_id, **given), gymnasium.make_vec(env_id, 2, **given)):
        found = getattr(env.unwrapped.game, option)
        assert found == (5, 7) and {type(found), *map(type, found)} == {tuple, int}
        hash(env.unwrapped.game)


@each_range
@pytest.mark.parametrize("num_envs", [0, 2])
def test_ranges_of_wrappers_are_taken_in_any_form(kind: str, num_envs: int) -> None:
    def made(count: Any) -> Any:
        return noisy_tokens(gymnasium.make_vec(TAG, num_envs) if num_envs else gymnasium.make(TAG), count, "marginal")

    assert made(RANGES[kind](0, 3)).observation_space == made((0, 3)).observation_space


def test_a_spec_records_what_json_can_hold() -> None:
    env = AddNoiseTokens(gymnasium.make(CENTROID), Listed(0, np.int64(3)), scale=np.float32(0.5), frozen=np.True_)
    assert env.spec is not None
    again = gymnasium.make(gymnasium.envs.registration.EnvSpec.from_json(env.spec.to_json()))
    assert again.observation_space == env.observation_space


def test_ranges_of_pettingzoo_and_of_your_own_games() -> None:
    env = simple_centroid_v0.parallel_env(num_noise=Listed(0, 3))
    assert env.unwrapped.game == SimpleCentroid(num_noise=(0, 3))
    for kind in RANGES.values():  # a game that keeps what it is given
        check_count("num_pebbles", kind(2, 4), minimum=0)
        assert (lowest(kind(2, 4)), highest(kind(2, 4))) == (2, 4)
    assert lowest(np.int64(3)) == highest(3) == 3


def test_numbers_and_flags_of_vectors_may_be_of_numpy() -> None:
    options = {"max_episode_steps": np.array(3), "copy": np.False_, "check_actions": np.array(True)}
    envs: Any = gymnasium.make_vec(CENTROID, num_envs=np.int64(2), **options)
    assert type(envs.num_envs) is int and envs.max_steps == 3 and envs.check_actions is True
    assert envs.reset(seed=np.array(5))[0].shape[0] == 2


@pytest.mark.parametrize("value", ["04", b"04", "0,4", range(4), 3.5, None, {0: 4}, [0, 4, 8], [0.5, 4], [[0, 4]]])
def test_what_is_no_range_is_named(value: Any) -> None:
    """A string is no sequence of digits, and a Python range leaves out its end."""
    with pytest.raises(TypeError, match=r"num_noise=.*: expected an integer or a range \(low, high\)"):
        gymnasium.make(CENTROID, num_noise=value)


def test_what_is_plain_stays() -> None:
    function = plain
    for value in (3, 2.5, True, None, "word", (1, (2, "x")), function, {"a": [1]}):
        assert plain(value) is value or plain(value) == value
    assert plain([Listed(np.str_("a")), np.arange(4).reshape(2, 2)]) == (("a",), ((0, 1), (2, 3)))


@pytest.mark.parametrize("padding", [float("nan"), float("inf")])
def test_padding_is_a_number(padding: float) -> None:
    """Nothing equals NaN: no row would be padding."""
    with pytest.raises(ValueError, match=f"padding={padding}: expected a finite number"):
        TokenSpec(3, ("x", "y"), {}, padding=padding)


def test_settings_of_supervised_runs_are_taken_in_any_form(tmp_path: Path) -> None:
    pytest.importorskip("tyro")
    knn_centroid = load_supervised("knn_centroid")
    given = knn_centroid.Args(
        out=tmp_path,
        seeds=Listed(1, 2),
        folds=np.array([1, 3]),
        epochs=np.int64(2),
        num_neighbors=[1, 4],
    )
    assert given == knn_centroid.Args(out=tmp_path, seeds=(1, 2), folds=(1, 3), epochs=2, num_neighbors=(1, 4))
    assert type(given.epochs) is int and given.folds == (1, 3)
    knn_centroid.experiment.check(given, ["adapool", *given.pooling])


@pytest.mark.parametrize(
    ("query", "places"),
    [(np.int64(3), (3,)), (np.array([0, 2]), (0, 2)), (Listed(0, 2), (0, 2)), ([np.int32(1), 2], (1, 2))],
    ids=str,
)
def test_queries_are_taken_in_any_form(query: Any, places: tuple[int, ...]) -> None:
    pooling = pytest.importorskip("noisy_envs.nn.pooling")
    found = pooling.AdaPool(8, 2, query).query_source
    assert found == places and {*map(type, found)} == {int}


@pytest.mark.parametrize("query", ["02", np.array([0.5]), Listed(0, True), np.array([-1]), Listed(), np.True_], ids=str)
def test_what_is_no_query_is_named(query: Any) -> None:
    pooling = pytest.importorskip("noisy_envs.nn.pooling")
    with pytest.raises(ValueError, match=r"query=.*: expected an index >= 0, several of them, 'mean' or 'learned'"):
        pooling.AdaPool(8, 2, query)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_real_options_of_heads_are_finite(value: float) -> None:
    """A scale of infinity gives NaN where it meets 0; weights that float32 cannot square give infinity."""
    pooling = pytest.importorskip("noisy_envs.nn.pooling")
    for option in ("scale", "init_std", "output_std"):
        with pytest.raises(ValueError, match=rf"{option}={re.escape(str(value))}: expected a number from"):
            pooling.AdaPool(8, 2, **{option: value})
    with pytest.raises(ValueError, match=rf"init_std={re.escape(str(value))}: expected a number from 0 to 1e18"):
        pooling.ClsToken(8, init_std=value)


def test_deviations_are_not_negative() -> None:
    pooling = pytest.importorskip("noisy_envs.nn.pooling")
    with pytest.raises(ValueError, match=r"init_std=-1: expected a number from 0 to 1e18"):
        pooling.ClsToken(8, init_std=-1)
    with pytest.raises(ValueError, match=r"output_std=-1: expected a number from 0 to 1e18"):
        pooling.AdaPool(8, output_std=-1)
    pooling.AdaPool(8, scale=-1.0, init_std=0.0)  # scores may have any sign


def test_a_spec_is_json_whatever_numbers_it_was_made_with() -> None:
    given = {"num_noise": np.array([1, 3]), "num_signal": np.int64(2), "spread": np.float32(0.5)}
    for env in (gymnasium.make(CENTROID, **given), gymnasium.make_vec(CENTROID, num_envs=2, **given)):
        spec: Any = env.spec
        again = gymnasium.envs.registration.EnvSpec.from_json(spec.to_json())
        assert (again.kwargs["num_signal"], list(again.kwargs["num_noise"])) == (2, [1, 3])
