"""Checks of options and arguments, with one phrasing of errors: `{name}={value!r}: expected {what}`."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from noisy_envs.arrays import as_numpy

MAX_COUNT = 2**63 - 1  # the largest int64
MAX_NUMBER, MIN_NUMBER = 1e18, 1e-18  # of a float option: its square still fits float32
Count = int | tuple[int, int]  # a number, or an inclusive range (low, high)


def unexpected(name: str, value: Any, expected: str, error: type[Exception] = ValueError) -> Exception:
    """Return the error for an argument that is not what is expected."""
    return error(f"{name}={value!r}: expected {expected}")


def lowest(count: Count) -> int:
    """Return the smallest number that `count` allows."""
    return count if isinstance(count, (int, np.integer)) else count[0]


def highest(count: Count) -> int:
    """Return the largest number that `count` allows."""
    return count if isinstance(count, (int, np.integer)) else count[1]


def is_int(value: Any) -> bool:
    """Tell whether a value is an integer; a bool is not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_count(name: str, value: Any, minimum: int, may_be_range: bool = True, maximum: int = MAX_COUNT) -> None:
    """Raise unless `value` is an integer from `minimum` to `maximum`, or an ordered pair of such integers."""
    value = plain(value)
    if is_int(value):
        values = [value]
    elif may_be_range and isinstance(value, tuple) and len(value) == 2 and all(map(is_int, value)):
        values = list(value)
    else:
        raise unexpected(name, value, "an integer or a range (low, high)" if may_be_range else "an integer", TypeError)
    if min(values) < minimum or values != sorted(values):
        raise unexpected(name, value, f"at least {minimum}" + (" and low <= high" if len(values) == 2 else ""))
    if max(values) > maximum:
        raise unexpected(name, value, f"at most {maximum}")


def check_number(name: str, value: Any, minimum: float | None = None, above: float | None = None) -> None:
    """Raise unless `value` is a finite number within the limits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise unexpected(name, value, "a number", TypeError)
    if not abs(value) <= MAX_NUMBER:  # also for NaN
        raise unexpected(name, value, f"a finite number, at most {MAX_NUMBER:g} in size")
    if 0 < abs(value) < MIN_NUMBER:
        raise unexpected(name, value, f"0 or a number of at least {MIN_NUMBER:g} in size")
    if minimum is not None and value < minimum:
        raise unexpected(name, value, f"at least {minimum}")
    if above is not None and value <= above:
        raise unexpected(name, value, f"a number above {above}")


def check_flag(name: str, value: Any) -> None:
    """Raise unless `value` is a bool."""
    if not isinstance(value, bool):
        raise unexpected(name, value, "True or False", TypeError)


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise unless `value` is one of `choices`."""
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise unexpected(name, value, f"one of {', '.join(map(repr, choices))}")


def check_policy(name: str, value: Any, names: tuple[str, ...]) -> None:
    """Raise unless `value` is a function or the name of a built-in policy."""
    if not callable(value) and not (isinstance(value, str) and value in names):
        raise unexpected(name, value, f"one of {', '.join(map(repr, names))}, or a function")


def check_array(name: str, value: Any, shape: tuple[int, ...], limit: float) -> np.ndarray:
    """Return `value` as float32, or raise unless it has the shape and all its numbers lie within ±limit."""
    try:
        array = as_numpy(value)
    except ValueError:  # a ragged list
        raise ValueError(f"{name}: expected numbers of shape {shape}") from None
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name}: expected numbers, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
    inside = np.abs(array.astype(np.float64)) <= limit  # False for NaN; float, as abs of the lowest int64 overflows
    if not inside.all():
        raise ValueError(f"{name}: expected numbers from -{limit:g} to {limit:g}, got {array[~inside][0]}")
    return array.astype(np.float32)


def check_fields(name: str, value: Any, required: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Raise unless `value` is a mapping with all required keys and no unknown one."""
    if not isinstance(value, Mapping):
        raise unexpected(name, value, f"a mapping with the keys {', '.join(known)}", TypeError)
    missing = [key for key in required if key not in value]
    unknown = [key for key in value if key not in known]
    if missing or unknown:
        raise ValueError(f"{name}: missing keys {missing}, unknown keys {unknown}; expected {', '.join(known)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the nearest known name, or "" if none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def build(game: type, options: dict[str, Any]) -> Any:
    """Make a game from keyword options: the only place where free-form keywords are accepted.

    Raises:
        TypeError: unknown option; the message suggests the nearest known one.
        ValueError: invalid value, for example `max_steps` below 1.
    """
    known = [field.name for field in dataclasses.fields(game)]
    for option in options:
        if option not in known:
            hint = did_you_mean(option, known)
            # starts like Python's own message, which TorchRL's GymEnv looks for
            raise TypeError(f"unexpected keyword argument {option!r}: {hint}expected one of {', '.join(known)}")
    made = game(**options)
    check_count("max_steps", made.max_steps, minimum=1, may_be_range=False)  # a user's game may not check it
    return made


def plain(value: Any) -> Any:
    """Turn sequences and arrays into tuples and NumPy numbers into Python's, so that a game stays hashable.

    Strings are kept. So is `range`, which could be too long to expand; no option accepts it.
    """
    if hasattr(value, "tolist"):  # a NumPy array or number, or a tensor
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, range)):
        return tuple(plain(item) for item in value)
    return value
