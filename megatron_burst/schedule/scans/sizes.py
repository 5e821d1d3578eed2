# SPDX-License-Identifier: Apache-2.0
"""Bytes of a scan: of states, of maps, of each hop, and what each rank sends.

Sizes are plain numbers, so no torch is needed. Block by block a map costs what a state does, and
the part of its transition that such a block needs.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from ..topology import Topology
from .blocks import Blocks, able, cut
from .hops import MAP, WHOLE, Hops

Form = Literal["none", "scalar", "vector", "matrix"]


class ScanSizes(NamedTuple):
    """The states of a scan, [batch, heads, rows, columns], `itemsize` bytes per element.

    form: of the transitions: "none" (a state is kept), "scalar" (a factor per head), "vector" (one
    per row) or "matrix" (rows x rows, which mixes rows).
    """

    batch: int
    heads: int
    rows: int
    columns: int
    form: Form = "none"
    itemsize: int = 4

    @property
    def state(self) -> int:
        """Bytes of a state."""
        return self.batch * self.heads * self.rows * self.columns * self.itemsize

    @property
    def transition(self) -> int:
        """Bytes of a transition."""
        return self._transition(self.heads, self.rows)

    @property
    def map(self) -> int:
        """Bytes of a map."""
        return self.state + self.transition

    def _transition(self, heads: int, rows: int) -> int:
        each = {"none": 0, "scalar": 1, "vector": rows, "matrix": self.rows * self.rows}[self.form]
        return self.batch * heads * each * self.itemsize

    def cut(self, blocks: int) -> Blocks:
        """A state in so many blocks; ValueError where there are no equal ones."""
        return cut(blocks, self.heads, self.rows, self.columns, self.form == "matrix")

    def numbers(self, most: int) -> list[int]:
        """All numbers of blocks up to `most` into which a state can be cut."""
        return able(most, self.heads, self.rows, self.columns, self.form == "matrix")

    def of(self, hops: Hops, blocks: int) -> np.ndarray:
        """int64 [hops]: bytes of each hop of a table made for so many blocks."""
        heads, rows, _ = self.cut(blocks).shape
        whole = hops.block == WHOLE
        state = np.where(whole, self.state, self.state // blocks)
        transition = np.where(whole, self.transition, self._transition(heads, rows))
        return state + np.where(hops.kind == MAP, transition, 0)

    def sent(self, hops: Hops, blocks: int, topology: Topology) -> np.ndarray:
        """int64 [ranks, 2]: bytes that each rank sends within its node, and to other nodes."""
        nodes = topology.per_node
        far = hops.source // nodes != hops.destination // nodes
        each = self.of(hops, blocks)
        found = [np.bincount(hops.source[link], each[link], topology.size) for link in (~far, far)]
        return np.stack(found, axis=1).astype(np.int64)
