"""Plans of a step: micro-batches of groups of ranks that run whole documents.

Rivals differ in the plan; this module computes its cost, in the same way for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .rings import Ring, Way
from .setting import Setting


class Group(NamedTuple):
    """Neighbouring ranks, and the lengths of their documents."""

    size: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> float:
        """Return the tokens of each rank."""
        return sum(self.lengths) / self.size

    @property
    def squares(self) -> float:
        """Return the sum of the squared lengths."""
        return float(sum(length * length for length in self.lengths))


MicroBatch = Sequence[Group]


class Rings:
    """Groups of all sizes with one kind of exchange; their costs are simulated once each."""

    def __init__(self, setting: Setting, way: Way):
        self.setting, self.way = setting, way
        self._rings: dict[int, Ring] = {}

    def of(self, size: int) -> Ring:
        """Return the groups of this size."""
        if size not in self._rings:
            self._rings[size] = Ring(self.setting, size, self.way)
        return self._rings[size]

    def layer(self, group: Group) -> float:
        """Return seconds of a layer, forward and backward, for the documents of a group."""
        return self.of(group.size).layer(group.tokens, group.squares)


def together(plan: Sequence[MicroBatch], rings: Rings) -> float:
    """Return seconds of a layer if all ranks end every micro-batch together.

    This is required if groups change. The slowest group of each micro-batch counts.
    """
    return sum(max(rings.layer(group) for group in groups) for groups in plan)


def apart(plan: Sequence[MicroBatch], rings: Rings) -> float:
    """Return seconds of a layer if groups stay the same and meet only at the end of a step."""
    ends = np.zeros(len(plan[0]))
    for groups in plan:
        ends += [rings.layer(group) for group in groups]
    return float(ends.max())
