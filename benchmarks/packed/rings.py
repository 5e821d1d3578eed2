"""Zigzag within every document on a group of neighbouring ranks, by the package's simulator.

All ranks of such a group do the same work. Time depends only on the tokens and on the sum of
squared lengths: documents are treated as divisible, so padding to multiples of 2 x ranks is not
counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_burst.autotune.simulator import pass_time
from megatron_burst.layout import make
from megatron_burst.masks import Causal
from megatron_burst.schedule import rings
from megatron_burst.schedule.demand import all_visible, visibility_of
from megatron_burst.schedule.rings import Schedule

from .setting import Setting


class Way(NamedTuple):
    """Exchange of a group: the fastest of `algorithms`.

    Attributes:
        whole: True to send whole chunks if any of their rows is visible; False to send only visible
            rows.
    """

    algorithms: tuple[str, ...]
    whole: bool = False


FLAT = Way(("ring",), whole=True)
BURST_WHOLE = Way(("burst",), whole=True)
ROWS = Way(("burst", "multicast"))


class Ring:
    """Groups of `size` ranks with one kind of exchange."""

    def __init__(self, setting: Setting, size: int, way: Way):
        self.setting, self.size, self.way = setting, size, way
        self._passes: dict[tuple[float, float], tuple[float, float]] = {}

    def passes(self, tokens: float, squares: float) -> tuple[float, float]:
        """Return seconds of attention, forward and backward.

        Args:
            tokens: Tokens per rank.
            squares: Sum of the squared document lengths.
        """
        key = (tokens, squares)
        if key not in self._passes:
            self._passes[key] = self._simulated(*key) if tokens else (0.0, 0.0)
        return self._passes[key]

    def _simulated(self, tokens: float, squares: float) -> tuple[float, float]:
        setting = self.setting
        # Rank i has pieces i and 2n - 1 - i of each document: two squares of pieces with every
        # other rank, and a square and two triangles with itself.
        piece_pairs = squares / (2 * self.size) ** 2
        pairs = np.full((self.size, self.size), 2 * piece_pairs)
        pairs += np.eye(self.size) * tokens / 2
        share = tokens / setting.tokens  # fraction of a chunk's bytes; link rates are divided by it
        links = {name: getattr(setting.rates, name) / share for name in ("intra", "inter")}
        rates = setting.rates.__class__(**{**vars(setting.rates), **links})
        forward, backward = (
            min(
                pass_time(schedule, setting.sizes, pairs * per, rates).seconds
                for schedule in schedules
            )
            for schedules, per in zip(self._schedules, setting.per_pair, strict=True)
        )
        return forward, backward

    def layer(self, tokens: float, squares: float) -> float:
        """Return seconds of a layer, forward and backward, with its matrix products."""
        return sum(self.passes(tokens, squares)) + self.setting.per_token * tokens

    @cached_property
    def _schedules(self) -> tuple[Sequence[Schedule], Sequence[Schedule]]:
        setting, size, grid = self.setting, self.size, self.setting.grid(self.size)
        if self.way.whole or size == 1:
            visibility = all_visible(size, setting.tokens)
        else:
            layout = make("zigzag", cp_size=size)
            shards = [layout.spans(rank, size * setting.tokens) for rank in range(size)]
            visibility = visibility_of(Causal(), shards, shards)
        rows, names = setting.sizes, self.way.algorithms
        return (
            [rings.forward(name, grid, visibility=visibility, row_bytes=rows.forward)
             for name in names],
            [rings.backward(name, grid, "kv", visibility=visibility, row_bytes=rows.backward)
             for name in names],
        )  # fmt: skip
