# SPDX-License-Identifier: Apache-2.0
"""Algorithms of single layers, as `--burst-per-layer` states them: `window=ring,1-2=tile`.

Owns the grammar: parts with commas between them, each WHICH=ALGORITHM. WHICH is a kind of layers or
numbers of layers, which count from 1 over the whole model; numbers go before kinds.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .algorithms import ALGORITHMS

WINDOW, FULL = "window", "full"
_KINDS = (WINDOW, FULL)
# What is chosen elsewhere, by words that people may try.
_ELSEWHERE = {"sparse": "--burst-sparse", "linear": "--burst-linear", "mamba": "--burst-linear"}


class LayerChoice(NamedTuple):
    """One part: its text, a kind of layers or the first and last number, and their algorithm."""

    text: str
    kind: str | None
    first: int
    last: int
    algorithm: str


class LayerChoices(NamedTuple):
    """The parts of one text, in its order."""

    parts: tuple[LayerChoice, ...]

    def algorithm(self, number: int, windowed: bool) -> str | None:
        """That of layer `number`, from 1 on, with or without a window; None if no part names it."""
        kind, found = WINDOW if windowed else FULL, None
        for part in self.parts:
            if part.kind is None and part.first <= number <= part.last:
                return part.algorithm
            if part.kind == kind:
                found = part.algorithm
        return found


def numbers_layers(text: str) -> bool:
    """Whether a part of a text that is right names layers by their numbers."""
    return any(part.kind is None for part in layer_choices(text).parts)


def layer_choices(text: str) -> LayerChoices:
    """The choices that a text states. Raises ValueError, which does not name the flag, for a text
    that is not of this grammar or states two algorithms of one layer."""
    parts: list[LayerChoice] = []
    for word in text.split(","):
        part = _part(word.strip())
        for other in parts:
            same = part.kind == other.kind
            if same and (part.kind or (part.first <= other.last and other.first <= part.last)):
                raise ValueError(f"{other.text} and {part.text} are of the same layers: keep one")
        parts.append(part)
    return LayerChoices(tuple(parts))


def _part(word: str) -> LayerChoice:
    which, _, algorithm = word.partition("=")
    if which in _ELSEWHERE:
        raise ValueError(f"{word!r}: {_ELSEWHERE[which]} is for such layers")
    numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", which)
    if which not in _KINDS and numbers is None:
        raise ValueError(
            f"{word!r} must be WHICH=ALGORITHM, with {WINDOW}, {FULL}, a number of a layer or a "
            "range of them, such as 5-8"
        )
    if algorithm not in ALGORITHMS:
        raise ValueError(f"{word!r}: the algorithm must be one of {', '.join(ALGORITHMS)}")
    first = last = 0
    if numbers is not None:
        first = int(numbers[1])
        last = int(numbers[2] or first)
        if not 1 <= first <= last:
            raise ValueError(f"{word!r}: layers count from 1, and a range from its lower end")
    return LayerChoice(word, None if numbers else which, first, last, algorithm)
