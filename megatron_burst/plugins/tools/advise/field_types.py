# SPDX-License-Identifier: Apache-2.0
"""Check of a value against the type of a dataclass field."""

from __future__ import annotations

from types import NoneType
from typing import Any, get_args


def problem_of(kind: Any, value: Any, least: int = 0) -> str:
    """Return the reason why a value does not have a type; "" if it does.

    Args:
        kind: `int`, `bool`, `str`, `float` (a fraction from 0 to 1), a `Literal` of strings, or a
            union of one of these types and None.
        value: Value to check.
        least: Minimum of an integer.
    """
    choices = get_args(kind)
    if NoneType in choices:
        if value is None:
            return ""
        (kind,) = (choice for choice in choices if choice is not NoneType)
    elif choices:
        fits = isinstance(value, str) and value in choices
        return "" if fits else f"must be one of {', '.join(choices)}, got {value!r}"
    if kind is float:
        fits = type(value) in (int, float) and 0 <= value <= 1
        expected = "from 0 to 1"
    elif kind is int:
        fits = type(value) is int and value >= least
        expected = f"an integer >= {least}"
    else:
        fits = type(value) is kind
        expected = {bool: "true or false", str: "a string"}[kind]
    return "" if fits else f"must be {expected}, got {value!r}"
