"""Checks of what users hand over: an error names the value and what is allowed."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from noisy_envs.arrays import as_numpy

MAX_COUNT = 2**63 - 1  # of a whole number
MAX_NUMBER, MIN_NUMBER = 1e18, 1e-18  # of a real option: float32 holds it, and what is computed from it, squares too
Count = int | tuple[int, int]  # a number, or the lowest and highest of a range, both included


def lowest(count: Count) -> int:
    """Return the smallest number that `count` allows."""
    return count if isinstance(count, (int, np.integer)) else count[0]


def highest(count: Count) -> int:
    """Return the largest number that `count` allows."""
    return count if isinstance(count, (int, np.integer)) else count[1]


def is_int(value: Any) -> bool:
    """Tell whether a value is a whole number; a bool is not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_count(name: str, value: Any, minimum: int, may_be_range: bool = True, maximum: int = MAX_COUNT) -> None:
    """Raise unless `value` is an integer from `minimum` to `maximum`, or a sequence of two, in order."""
    value = plain(value)
    if is_int(value):
        values = [value]
    elif may_be_range and isinstance(value, tuple) and len(value) == 2 and all(map(is_int, value)):
        values = list(value)
    else:
        allowed = "an integer or a range (low, high) of two" if may_be_range else "an integer"
        raise TypeError(f"{name}={value!r}: must be {allowed}")
    if min(values) < minimum or values != sorted(values):
        ordered = " and low <= high" if len(values) == 2 else ""
        raise ValueError(f"{name}={value!r}: must be at least {minimum}{ordered}")
    if max(values) > maximum:
        raise ValueError(f"{name}={value!r}: must be at most {maximum}")


def check_number(name: str, value: Any, minimum: float | None = None, above: float | None = None) -> None:
    """Raise unless `value` is a finite number within the limit."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r}: must be a number")
    if not abs(value) <= MAX_NUMBER:  # NaN fails too
        raise ValueError(f"{name}={value!r}: must be finite, and at most {MAX_NUMBER:g}")
    if 0 < abs(value) < MIN_NUMBER:
        raise ValueError(f"{name}={value!r}: must be at least {MIN_NUMBER:g}, where it is not 0")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name}={value!r}: must be at least {minimum}")
    if above is not None and value <= above:
        raise ValueError(f"{name}={value!r}: must be above {above}")


def check_flag(name: str, value: Any) -> None:
    """Raise unless `value` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be True or False")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raise unless `value` is one of `choices`."""
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}")


def check_policy(name: str, value: Any, names: tuple[str, ...]) -> None:
    """Raise unless `value` is a function or the name of a reference policy."""
    if not callable(value) and not (isinstance(value, str) and value in names):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, names))}, or a function")


def check_array(name: str, value: Any, shape: tuple[int, ...], limit: float) -> np.ndarray:
    """Return `value` as float32, or raise unless it has the shape and each number lies within ±limit."""
    try:
        array = as_numpy(value)
    except ValueError:
        raise ValueError(f"{name}: must be numbers of shape {shape}") from None
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name}: {array.dtype} must be numbers")
    if array.shape != shape:
        raise ValueError(f"{name}: shape {array.shape} must be {shape}")
    inside = np.abs(array.astype(np.float64)) <= limit  # NaN fails too; the lowest integer has no absolute value
    if not inside.all():
        worst = array[~inside][0]
        raise ValueError(f"{name}: {worst} must be within -{limit:g} … {limit:g}")
    return array.astype(np.float32)


def check_fields(name: str, value: Any, required: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Raise unless `value` is a mapping that has each required key and no unknown one."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}={value!r}: must be a mapping with the keys {', '.join(known)}")
    missing = [key for key in required if key not in value]
    unknown = [key for key in value if key not in known]
    if missing or unknown:
        raise ValueError(f"{name}: missing {missing}, unknown {unknown}; allowed are {', '.join(known)}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question for the nearest of the known words, or nothing if none is near."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def build(game: type, options: dict[str, Any]) -> Any:
    """Make a core from keyword options: the one place where free-form keywords enter.

    Raises:
        TypeError: an option does not exist; the message names the nearest that does.
        ValueError: an episode would have no step.
    """
    known = [field.name for field in dataclasses.fields(game)]
    for option in options:
        if option not in known:
            hint = did_you_mean(option, known)
            # Python's own words, by which TorchRL's GymEnv sees that it must leave one out
            raise TypeError(f"unexpected keyword argument {option!r}: {hint}allowed are {', '.join(known)}")
    made = game(**options)
    check_count("max_steps", made.max_steps, minimum=1, may_be_range=False)  # which a game of your own may not check
    return made


def plain(value: Any) -> Any:
    """Turn any sequence and array into a tuple, and NumPy's numbers into Python's, so that a core stays hashable.

    A string is no sequence here, and a Python `range`, which may be as long as it likes, is none of an option.
    """
    if hasattr(value, "tolist"):  # of NumPy, or a tensor
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, range)):
        return tuple(plain(item) for item in value)
    return value
